"""The programs that run on hosts, and the launcher's side of their protocols.

`dtrain.node.programs` lists the modules that are sent to hosts: Python 3.8, standard library only.
"""
