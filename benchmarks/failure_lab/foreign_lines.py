"""Lines of jobs on other stacks: services in Go, Rust, Java and C++, launchers, peers.

The lines are templates for `foreign`; `{n}`, `{host}`, `{clock}` and other fields are drawn anew
for each line. No line is taken from `routines`, nor from the labelled cases.
"""

# ruff: noqa: E501  (lines of logs stand as they are printed)

from typing import Final

START: Final = (
    "bootstrap: rendezvous of {world} members at tcp://{host}:{port} settled in {ms} ms",
    "job spec:",
    "  restart_policy: on_failure_never",
    "  fatal_signals: [6, 11]",
    "  error_budget: {{per_hour: 4, abort_when_spent: false}}",
    "  oom_score_adj: -500",
    "  kill_grace_period: 45s",
    "  retry: {{attempts: 6, backoff: exponential, give_up_on: [401, 403]}}",
    "shell: ulimit -c 0; ulimit -l unlimited",
    "hyperloader 0.18.3 (rustc 1.79.0) with 24 reader threads",
    "mesh: data=8 x fsdp=4 x tensor=2, ring order {n},{m}",
)

CHATTER: Final = (
    'level=info ts={date}T{clock}.{milli}Z caller=scheduler.go:{n} msg="lease renewed" holder={host} ttl=30s',
    "level=debug ts={date}T{clock}.{milli}Z caller=probe.go:88 component=liveness status=200 latency={ms}ms failures=0",
    '{{"lvl":"info","t":"{date}T{clock}.{milli}Z","logger":"quota","text":"usage sampled","cpu":{n},"errors_total":0}}',
    "I{month}{day} {clock}.{micro} {pid} shard_reader.cc:{n}] opened /feed/part-{big}.rec ({m} records, 0 corrupt)",
    "{date}T{clock}.{micro}Z  INFO hyperloader::pool: refilled queue depth={n} misses=0 worker={m}",
    "{date}T{clock}.{micro}Z DEBUG hyperloader::codec: frame decoded bytes={big} crc=ok",
    "{short} {clock} INFO BlockFetcher: Got {n} local and {m} remote blocks, 0 failed",
    "{short} {clock} DEBUG GcMonitor: pause {ms} ms within limits, heap {n}%",
    "[thermal] {host} accel{local} {n} C fan auto throttle no",
    "[fabric-agent] {host} port {local} up 400 Gb/s symbol_err 0 link_downed 0",
    "smart: /dev/nvme{local}n1 PASSED spare 100% media_errors 0",
    "gc: generation 2 collected {n} objects in {ms} ms",
    "prof: window {n}: fwd {ms} ms, bwd {ms} ms, comm {ms} ms, idle 0 ms",
    "cache: hit ratio 0.9{n} evictions {m}",
    "data: bucket {n} packed to 0.99{m}, dropped 0",
    "kernel cache: compiled fused_rope_{n} (sm_90a) and stored it",
)

PROGRESS: Final = (
    "upd {step:07d}  ce={loss}  bpb=0.8{m}  thru={big} tok/s",
    "train/{step} ce {loss} gnorm 0.{n} lr 2.9e-04 ({ms} ms)",
    'metrics {{"iter": {step}, "loss": {loss}, "grad_norm": 0.{n}, "lr": 0.0002}}',
    "{step}/90000 ━━━━━━━━━━━━━━━━━━━━ 9:12:0{local} {ms}ms/step - accuracy: 0.41 - loss: {loss}",
)
"""The line that a trainer prints for each step; one for each trainer."""

SURVIVED: Final = (
    (
        "WARN hyperloader::source: fetch s3-gw-{local}/part-{big} attempt=1 err=Os {{ code: 104, kind: ConnectionReset }} next_try_in=800ms",
        "INFO hyperloader::source: fetch s3-gw-{local}/part-{big} attempt=2 ok",
    ),
    (
        "java.net.SocketTimeoutException: Read timed out",
        "\tat java.base/sun.nio.ch.NioSocketImpl.timedRead(NioSocketImpl.java:{n})",
        "\tat org.feed.Client.pull(Client.java:{m})",
        "{short} {clock} WARN Client: pulled from the mirror instead",
    ),
    (
        'level=error ts={date}T{clock}.{milli}Z caller=push.go:{n} msg="remote write refused" code=503 action=buffered',
        'level=info ts={date}T{clock}.{milli}Z caller=push.go:{m} msg="buffer drained" pending=0',
    ),
    (
        "Traceback (most recent call last):",
        '  File "/opt/stack/telemetry/drain.py", line {n}, in emit',
        "    self._channel.send(frame)",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "telemetry: drain reopened, {m} frames kept",
    ),
    (
        "Traceback (most recent call last):",
        '  File "/opt/stack/kernels/registry.py", line {n}, in probe',
        "    import fast_attention_hopper",
        "ModuleNotFoundError: No module named 'fast_attention_hopper'",
        "kernels: using the portable attention",
    ),
    ("autosize: micro-batch {n} did not fit (out of memory), going on with half of it",),
    ("mem-scrub: {host} accel{local} 1 corrected bit, 0 uncorrectable",),
    (
        "E{month}{day} {clock}.{micro} {pid} snapshot.cc:{n}] write to /snap/slot-{local} stalled for {m} s; slot rotated",
        "I{month}{day} {clock}.{micro} {pid} snapshot.cc:{m}] slot rotated, snapshot whole",
    ),
)

DOWN: Final = (
    (
        "[{clock}] rank {rank}: UCX  ERROR endpoint to rank {peer} closed: Connection reset by remote peer",
        "[{clock}] rank {rank}: leaving ring {n}",
    ),
    (
        "[rank{rank}]: Traceback (most recent call last):",
        '[rank{rank}]:   File "/opt/stack/engine/collect.py", line {n}, in gather',
        "[rank{rank}]: RuntimeError: [/build/gloo/transport/tcp/pair.cc:{m}] Read error [10.8.{local}.{n}]:{port}: Connection reset by peer",
    ),
    (
        "{host}: member {rank} lost contact with member {peer}, membership epoch {n} dissolved",
        "{host}: draining {m} in-flight requests",
    ),
    (
        "[{host}:{pid}] *** Process received signal ***",
        "[{host}:{pid}] Signal: Terminated (15)",
        "[{host}:{pid}] *** End of error message ***",
    ),
    (
        'level=warn ts={date}T{clock}.{milli}Z caller=reaper.go:{n} msg="stopping sibling" member={rank} reason=group_exit',
    ),
    ("hyperloader: consumer {rank} hung up, reader {local} parked",),
    (
        "[rank{rank}]: horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce after one of the ranks finished execution.",
    ),
    (
        "terminate called after throwing an instance of 'ring::PeerGone'",
        "  what():  member {peer} is gone",
        "{host}: member {rank} ended with signal 6",
    ),
    (
        "[{host}:{pid}] [[{n},1],{rank}] ORTE_ERROR_LOG: Unreachable in file routed_radix.c at line {m}",
    ),
    (
        "Traceback (most recent call last):",
        '  File "/opt/stack/engine/guard.py", line {n}, in wait_all',
        "    raise PeerGone(member)",
        "engine.guard.PeerGone: member {peer} left while member {rank} was waiting for it",
    ),
)
"""Lines of the peers as the job goes down. The lines are equal for every cause."""

PREFIXES: Final = (
    "",
    "{host} | ",
    "pretrain-{node}-{suffix} engine ",
    "{date}T{clock}.{milli}000000Z stdout F ",
    "{host}\t{clock}\t",
    "<task{node}> ",
    "{month}/{day} {clock} {host} engine[{pid}]: ",
)
"""Prefixes of launchers and collectors. A log has one of the prefixes before every line."""
