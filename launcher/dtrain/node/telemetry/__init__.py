"""What a host, its GPUs and its ranks do, sampled once a second. Python 3.8, standard library only.

The supervisor's sampler thread writes two files in the run's folder, and the relay follows them:

    telemetry-now   the latest sample: one line, replaced every second
    telemetry       the averages of every 10 s: a line each, the oldest dropped beyond `MAX_STORED`

So a launcher that attaches gets the averages that it lacks. A sample is an object, see
`dtrain.messages.telemetry`; a value that this host does not have is null:

    time        seconds since the epoch
    cpu         busy CPUs
    cpus        number of CPUs
    memory      [used, total] bytes
    storage     [used, total] bytes of the disk with the run's folder
    losses      packets per second that the network lost
    round_trip  milliseconds of the fastest TCP connection of a rank with another host
    disk, network, infiniband   [bytes read or received, written or sent] per second
    gpus        a list for each GPU, in the order of `tool.FIELDS`
    ranks       [process, busy CPUs, bytes of memory, open files] for each, with its children
"""
