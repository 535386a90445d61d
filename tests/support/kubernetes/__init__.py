"""Plays a Kubernetes cluster for Indexed Jobs: API server, Job controller, and kubelets.

Decisions are functions of values: `job.py` reads a manifest, `policies.py` and `controller.py`
decide as the Job controller does, `environment.py` and `image.py` say what a container gets, and
`probes.py` judges probes. `container.py` runs a container's command as a real process, `pod.py`
holds a pod, and `cluster.py` is the control loop over all pods. Each file names the page of the
documentation that it follows.

What is not played: scheduling by resources, restart policies other than Never, init containers,
memory limits, users, read-only file systems, network policies, and networks that lose packets.
"""
