#!/usr/bin/env bash
## The script of each pod. `script.py` fills it, see `dtrain.launchplan.script_file`.
#: title
exec 2>&1 # Kubernetes does not keep the order of two streams.
echo "[dtrain] begins"

dtrain_node_rank=$JOB_COMPLETION_INDEX
#: values
if [ -e "$DTRAIN_RUN_DIR" ]; then
  echo "this container cannot start again alone: the other pods do not wait for it"
  exit 1
fi
(umask 077 && mkdir -p -- "$DTRAIN_RUN_DIR") || exit
#: files

# One process: becomes number $dtrain_local_rank of this pod.
dtrain_process() {
  #: environment
  cd -- "$dtrain_workdir" || exit
  #: program
}

# Puts a name in front of each line, and name+ in front of a piece of a longer one. Ends
# with its input, or after $dtrain_last, which may follow a line without a newline.
## G adds a newline, which P writes, also after a last line that had none. The hold space is empty
## until that line. Bytes that continue a character of UTF-8 stay with its first one.
## With a name, a piece of 450 bytes has less than the 512 that POSIX writes to a pipe without
## others in between. A larger number makes sed slow: from 1,000 on, its table for the regular
## expression is full before a long line ends.
dtrain_last=dtrain-$RANDOM$RANDOM$RANDOM
dtrain_label() {
  trap '' TERM
  LC_ALL=C sed -nu "
    /\n/!{
      /$dtrain_last\$/{ s///; x; s/^/last/; x; /^\$/q; }
      /^.\{450\}/s/.\{450\}[\x80-\xbf]\{0,3\}/[$1+] &\n/g
    }
    /\n/{ P; D; }
    s/^/[$1] /; G; P; /\nlast\$/q"
}

# TERM for all processes, and KILL after job.grace. A program whose shell has ended gets
# TERM, too, and the rest of job.grace.
dtrain_status= dtrain_deadline= dtrain_processes=() dtrain_readers=() dtrain_names=()
dtrain_left=()
#if services
# Whether the pod need not wait at its end.
dtrain_works=
dtrain_main=() dtrain_done=
#end
dtrain_stop() {
  [ -z "$dtrain_deadline" ] || return
  #: deadline
  kill -TERM -- "${dtrain_processes[@]}" "${dtrain_left[@]}" 2>/dev/null
}
dtrain_term() {
  echo "[dtrain] TERM"
  #if services
  dtrain_works=1
  #end
  dtrain_status=${dtrain_status:-143}
  dtrain_stop
}
trap dtrain_term TERM

# A pipe to which nobody writes, to wait without a process of its own. It is opened here,
# before the job can remove it.
mkfifo "$DTRAIN_RUN_DIR/never" && exec 9<>"$DTRAIN_RUN_DIR/never" || exit

# Bash would write a line about each process that a signal has ended, but also why it cannot
# start one, which ends it.
exec 2>/dev/null
trap 'echo "not all processes of this pod could start"' EXIT

#: count
for ((dtrain_local_rank = 0; dtrain_local_rank < dtrain_count; dtrain_local_rank++)); do
  #: numbers
  dtrain_name=$dtrain_role-$dtrain_index
  dtrain_pipe=$DTRAIN_RUN_DIR/$dtrain_name
  mkfifo "$dtrain_pipe.out" "$dtrain_pipe.err" 2>&1 || exit
  dtrain_label "$dtrain_name" <"$dtrain_pipe.out" 2>&1 9>&- &
  dtrain_readers+=($!)
  dtrain_label "$dtrain_name err" <"$dtrain_pipe.err" 2>&1 9>&- &
  dtrain_readers+=($!)
  set -m # for a process group of its own
  (trap - TERM; dtrain_process) </dev/null >"$dtrain_pipe.out" 2>"$dtrain_pipe.err" 9>&- &
  set +m
  dtrain_processes+=($!)
  dtrain_names+=("$dtrain_name")
  echo $! >"$dtrain_pipe.pid"
  #if services
  [ -n "$dtrain_service" ] || dtrain_main+=("$dtrain_local_rank") dtrain_works=1
  #end
done
trap - EXIT
# dtrain_stop does not know a process that has just started.
[ -z "$dtrain_deadline" ] || kill -TERM "${dtrain_processes[@]}"

dtrain_waits() {
  ((${#dtrain_processes[@]})) && return
  [ -n "$dtrain_deadline" ] && ((SECONDS < dtrain_deadline)) || return
  kill -0 -- "${dtrain_left[@]}"
}
while dtrain_waits; do
  read -r -t 0.2 -u 9
  for dtrain_number in "${!dtrain_processes[@]}"; do
    kill -0 "${dtrain_processes[dtrain_number]}" && continue
    wait "${dtrain_processes[dtrain_number]}"
    dtrain_ended=$?
    dtrain_time=${EPOCHREALTIME:-$(date +%s)}
    echo "[dtrain] ${dtrain_names[dtrain_number]} ended: $dtrain_ended at ${dtrain_time/,/.}"
    dtrain_left+=("-${dtrain_processes[dtrain_number]}")
    [ -z "$dtrain_deadline" ] || kill -TERM -- "${dtrain_left[@]: -1}"
    unset "dtrain_processes[dtrain_number]"
    #if services
    [ -z "$dtrain_done" ] || continue
    #end
    if ((dtrain_ended)); then
      dtrain_status=${dtrain_status:-$dtrain_ended}
      dtrain_stop
    fi
  done
  #if services
  # Processes that serve the others end with the last of those.
  for dtrain_number in "${!dtrain_main[@]}"; do
    [ -z "${dtrain_processes[dtrain_main[dtrain_number]]}" ] || continue
    unset "dtrain_main[dtrain_number]"
    if ((! ${#dtrain_main[@]})); then
      dtrain_done=1
      dtrain_stop
    fi
  done
  #end
  if [ -n "$dtrain_deadline" ] && ((SECONDS >= dtrain_deadline)); then
    kill -KILL "${dtrain_processes[@]}"
  fi
done
trap '' TERM # a deletion changes nothing any more
# The last lines. A process that a worker has left may keep its pipe open, and the job
# may have removed the name of the pipe: then nothing ends the reader.
for dtrain_name in "${dtrain_names[@]}"; do
  for dtrain_pipe in "$DTRAIN_RUN_DIR/$dtrain_name".{out,err}; do
    if [ -p "$dtrain_pipe" ]; then
      echo "$dtrain_last" 1<>"$dtrain_pipe" # <>: there may be no reader any more
    else
      dtrain_patience=100
    fi
  done
done
while [ "$dtrain_patience" != 0 ] && kill -0 "${dtrain_readers[@]}"; do
  read -r -t 0.05 -u 9
  dtrain_patience=${dtrain_patience:+$((dtrain_patience - 1))}
done
# dtrain's watcher sends its last reports, if one runs in this pod. The job can write its file.
dtrain_watcher=
[ -f "$DTRAIN_RUN_DIR/watcher.pid" ] && read -r -n 10 dtrain_watcher <"$DTRAIN_RUN_DIR/watcher.pid"
if [[ $dtrain_watcher =~ ^[0-9]+$ && $(<"/proc/$dtrain_watcher/cmdline") == *dtrain-agent* ]]; then
  kill -TERM "$dtrain_watcher"
  for ((dtrain_patience = 40; dtrain_patience; dtrain_patience--)); do
    kill -0 "$dtrain_watcher" || break
    read -r -t 0.05 -u 9
  done
fi
#if services
# A pod that only serves may have failed because the others are done: Kubernetes then has
# some seconds to see that.
if ((dtrain_status)) && [ -z "$dtrain_works" ]; then
  read -r -t 5 -u 9
fi
#end
echo "[dtrain] ends"
exit $((dtrain_status))
