"""All orders of the events of two agents that leave a default order in a few places.

Real: the loop of an agent with all it is made of, one for each process (process.py).
Models: etcd (`tests/simulation/etcd.py`), workers and what they hold in memory (workers.py), and
time, which passes in ticks that are longer than a lease lives. A story (stories.py) says what
happens to the two nodes; search.py plays it in every order, and pair.py checks the rules of
`launcher/protocol/invariants.py` at each write.
"""
