"""What programs on hosts send to the launcher, as checked values. Pure.

A host may be broken or hostile, so nothing that it sends is used as it arrives. `decode` turns
bytes into JSON values and JSON values into typed ones, with limits on both; the other modules
declare the types: `agent` for the agent's messages, `facts` for `dtrain check`, `sync` for the
receiver of the working folder. `sequence` checks that events agree with the launch plan.

Whatever does not fit raises `ProtocolError`. The code that talks to the host adds the host's name
and what was attempted.
"""
