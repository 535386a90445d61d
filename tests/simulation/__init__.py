"""A simulator: agents of the real decision code on virtual time, against models of all the rest.

Real: the loop of an agent, `AgentCore`, with all it is made of (`Observer`, `ClusterObserver`,
`Subscriptions`, `Membership`, `StoreWriter`, `decide`), one for each agent, and `CaptureSchedule`.
Models: etcd and the way to it (etcd.py), workers, their process groups and what they hold in memory
(training.py, memory.py), storage (storage.py), machines and their clocks (agents.py).
A seed draws the cluster, the delays and the faults (drawing.py, directed.py); the rules of
`launcher/protocol/invariants.py` are checked at every event that could break one (rules.py).
"""
