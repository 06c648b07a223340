"""Checked messages from programs on hosts to the launcher. Pure.

A host may be broken or hostile, so the launcher checks everything that a host sends. `decode`
turns bytes into JSON values and JSON values into typed ones, with limits on both. The other
modules declare the types: `agent` for the agent's messages, `facts` for `dtrain check`, `sync` for
the receiver of the working folder. `sequence` checks that events agree with the launch plan.

Invalid input raises `ProtocolError`. The code that communicates with the host adds the host's name
and the attempted action.
"""
