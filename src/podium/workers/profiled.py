"""The policy's worker with a profiler: what a run with `profiler.tool` starts. Without one, nothing of this is in the way."""

from __future__ import annotations

from podium.config import ProfilerConfig
from podium.workers.actor_rollout_ref import ActorRolloutRefWorker, PolicySpec, Role
from podium.workers.profiling import DistProfiler, DistProfilerExtension


class ProfiledActorRolloutRefWorker(ActorRolloutRefWorker, DistProfilerExtension):
    """`ActorRolloutRefWorker` whose ranks the driver may profile. The profiler is made first, since it may be refused."""

    def __init__(self, spec: PolicySpec, role: Role, profiler: ProfilerConfig) -> None:
        DistProfilerExtension.__init__(self, DistProfiler(self.rank, profiler))
        ActorRolloutRefWorker.__init__(self, spec, role)
