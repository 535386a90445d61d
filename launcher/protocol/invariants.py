"""States what holds in a job's whole life, whatever happens to its nodes and to etcd.

Pure. `check_invariants` checks what two worlds can tell; `tests/simulation/rules.py` and
`promises.py` check all of these against the truth.
 R1  A generation has one world: no agent ever starts another document of the same number. If etcd
     loses its data there may be two histories, and two worlds of one number. A world is then only
     written over one that it outranks (`documents.outranks`), and no node trains on in the other.
 R2  Generations grow by one, also after a world that etcd has lost and an agent still has, and by
     two after a generation that workers have entered inside their loops and no world was written
     for. Members that stay keep their order; new members come last.
 R3  A world has MIN to MAX members. When it was written, each member was registered as this
     incarnation, or had been, or had reported, little more than a TTL before. Outages of etcd do
     not count towards that time. Its writer knew of no later registration of a member's node.
 R4  The state that a generation starts from is whole: each source holds the shard that it is named
     for, or has died since it reported it. A checkpoint that is named is committed.
 R5  That state is the job's own: the generation before reached it or itself started from it, or it
     is a checkpoint's. Neither the members that stay nor storage hold a newer one.
 R6  A node's workers train only in the newest generation of that node, and each rank once.
 R7  When faults stop and MIN nodes are present, the job makes progress, and ends.
 R8  `done` is the last document of its history, and no agent exits with 0 before it is written. It
     stays as long as an agent lives that has seen it.
 R9  When `done` says `finished`, the state's lineage has each step once, in order of generations.
 R10 A generation that trains is not ended by trouble with etcd alone, however long it lasts, nor by
     a loss of data that an agent can replace; nor by a section in which no step is due, nor by a
     lapsed lease while steps go on (but for R25). An agent that knows that etcd is away stops no
     workers at a boundary.
 R11 A member that has stopped, and has reported so, has a place in the next world. A waiting node
     has one as soon as there is room, and no backup of etcd was restored a moment ago. Excepted are
     nodes that leave, that are quarantined, and those beyond MAX. A world that workers have entered
     inside their loops takes in no node; the next one does.
 R12 What operators request is done soon after: no later world names a drained registration; after a
     stop no step is made, and the state in memory is saved. A node that is drained is taken into no
     world by an agent that knows of it. Where nodes only come, leave and are scaled as requested,
     no step is made twice.
 R13 A node is quarantined from the very world that its last failure brought about, as long as that
     world has MIN nodes without it. If it has not, it has no more than MIN with the nodes needed.
 R14 A spare takes over no job of which any node was registered less than a TTL ago.
 R15 Where nodes only come, leave and are lost, and etcd is well, no failure counts.
 R16 A generation that stands still for a lapsed lease ends soon: about a TTL after its last step,
     or after etcd is back.
 R17 Nodes that fail by bad input, or before they have made a step where others have, end no job
     that has MIN nodes without them, take no step from it, and count as no failure. If fewer are
     left, and the mistake cannot pass, no further generation is tried.
 R18 If a worker has died of itself, its own node reports that death, whichever node saw it first.
 R19 A job that ends as failed has saved the state in memory, unless its end says that it could not,
     and that was tried for --save-timeout; whichever node is lost meanwhile. Some seconds are
     enough in which storage answers. If the last checkpoint could not be written, no generation
     begins before it is, as long as the node is there that says so. Nodes that are away with a part
     of that state have --save-timeout to come back.
 R20 Once a run of the job has begun, no agent of an earlier one writes anything. It exits with the
     code for that, unless it has seen how its own run ended, or leaves.
 R21 The node of an agent whose loop meets an unexpected error leaves. An agent ends by such errors
     only once MAX_ERRORS of its turns have failed, and once its workers have stopped.
 R22 A committed step has all of its files, once every process that saves or removes has made its
     next request. Excepted is a step whose process was killed just before that, or has no answer of
     a storage that takes no requests any more: it counts as damaged, and no generation starts from
     it. Retention removes the shards of a step after its manifest, and a good one only if as many
     newer ones are good as are to be kept. A process that removes the files of a failed save takes
     none of a later try of the same save (FC4 in `loose_files`).
 R23 Of several agents of one name one is registered. Another one takes its place only once its
     registration is gone, and ends if that is not so in time.
 R24 While the number of the job's run cannot be read in etcd, no world and no end is written. A
     node whose agent has met that leaves.
 R25 While one agent alone stands still, its workers and all others train on for about a TTL after
     its lease has lapsed, and for as long again as training had gone on since the newest snapshot
     that all nodes hold; then its generation ends. It ends no sooner, and not at all where an agent
     of the node answers.
 R26 A world has one proposal at most, which is never made good again once it was withdrawn; and
     workers go over to no other generation inside their loops.
 R27 A world comes from a proposal or from a round, never from both: either all workers have
     entered it at its step and no alarm of the world before stands, or no proposal has its token.
     A node that the others have gone on without opens no round.
 R28 No rank applies a step twice, or leaves one out, when it goes over to another generation.
 R29 No agent finds more losses of etcd's data than there were.
"""

from __future__ import annotations

from itertools import accumulate

from elasticzero.launcher.protocol.documents import World


def check_invariants(before: World | None, after: World) -> None:
    """Checks what must hold between a world and the next one; raises AssertionError."""
    nodes = [member.node for member in after.members]
    assert len(set(nodes)) == len(nodes), "a node has one place"
    assert after.members and after.world_size > 0, "a world has ranks"
    assert list(accumulate(m.nproc for m in after.members))[-1] == after.world_size
    if before is not None:
        if after.entered:
            assert after.entered == before.generation + 1, "the generation that was entered follows"
        last = after.entered or before.generation
        assert after.generation == last + 1, "generations only grow, by one"
        stayed = [m.node for m in before.members if after.find(m.node, m.incarnation) is not None]
        assert nodes[: len(stayed)] == stayed, "those that stay keep their order, before new ones"
    if after.resume.tier == "ram":
        ranks = {source.rank for source in after.resume.sources}
        assert ranks == set(range(len(ranks))), "every rank of the snapshot has a source"
