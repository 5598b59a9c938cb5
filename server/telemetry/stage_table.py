"""The stages of a start that are known by name: what each was to prove, and how long it should take.

Data. `expected_s` is measured or computed for one H200 with the cuda backend and files in the page cache; on another
machine nothing is expected. A stage that is not listed here is shown all the same, without expectations.
"""

from dataclasses import dataclass

from server.launch.board import Role


@dataclass(frozen=True, slots=True)
class StageFacts:
    """`check`: what held when the stage ended, or it would not have ended. `expected_rate`: of its bytes, per second.

    `waits_for`: the stage does nothing but wait for what that stage of that role does, "": for all of them.
    """

    check: str
    expected_s: float | None = None
    expected_rate: float | None = None
    waits_for: tuple[Role, str] | None = None


_FORK = StageFacts("the child runs", 0.01)
_PROCESS = StageFacts("signals and logging set, the parent lives", 0.02)
_DYING = StageFacts("the dead process was reaped: its memory and sockets are free", 0.1)
_RESPAWN = StageFacts("the parent forks again", 0.01)

STAGES: dict[tuple[Role, str], StageFacts] = {
    (Role.MASTER, "python and gunicorn"): StageFacts("the interpreter and Gunicorn are imported", 0.12),
    (Role.MASTER, "imports"): StageFacts("our modules are imported, the settings are valid", 0.1),
    (Role.MASTER, "port"): StageFacts("the runtime folder is locked, the port is bound", 0.005),
    (Role.MASTER, "checkpoint"): StageFacts("every shard's header fits the model's configuration", 0.01),
    (Role.MASTER, "fork loader"): StageFacts("no second thread, CUDA untouched before the fork", 0.01),
    (Role.MASTER, "fork arbiter"): StageFacts("no second thread, CUDA untouched before the fork", 0.02),
    (Role.MASTER, "app"): StageFacts("FastAPI is imported", 0.25),
    (Role.MASTER, "tokenizer"): StageFacts("every file of the tokenizer is read and fits the model", 0.35),
    (Role.MASTER, "routes"): StageFacts("every route is registered", 0.03),
    (Role.MASTER, "fork web workers"): StageFacts("no second thread, CUDA untouched before the fork", 0.2),
    (Role.LOADER, "fork"): _FORK,
    (Role.LOADER, "context"): StageFacts("the driver answers, the device is named", 0.23),
    (Role.LOADER, "allocate"): StageFacts("memory for every tensor is there and handed over", 0.02),
    (Role.LOADER, "weights"): StageFacts("every byte of every tensor was read and copied", expected_rate=48e9),
    (Role.LOADER, "checksum"): StageFacts("no tensor differs from the checksum expected of it, if one is", 0.02),
    (Role.ARBITER, "dying"): _DYING,
    (Role.ARBITER, "respawn"): _RESPAWN,
    (Role.ARBITER, "fork"): _FORK,
    (Role.ARBITER, "process"): _PROCESS,
    (Role.ARBITER, "imports"): StageFacts(
        "the engine and its backend with its libraries are there, no device touched", 0.1
    ),
    (Role.ARBITER, "gunicorn"): StageFacts("the loop that reaps and forks runs", 0.02),
    (Role.ARBITER, "fork model worker"): StageFacts("no second thread, CUDA untouched before the fork", 0.02),
    (Role.MODEL, "dying"): _DYING,
    (Role.MODEL, "respawn"): _RESPAWN,
    (Role.MODEL, "fork"): _FORK,
    (Role.MODEL, "process"): _PROCESS,
    (Role.MODEL, "back-off"): StageFacts("the pause after a failed attempt is over"),
    (Role.MODEL, "vocabulary"): StageFacts("the ids that end a text are known", 0.07),
    (Role.MODEL, "wait for memory"): StageFacts(
        "the loader has made its context and the weights' memory", waits_for=(Role.LOADER, "allocate")
    ),
    (Role.MODEL, "context"): StageFacts("the device answers and has the memory that was planned", 0.19),
    (Role.MODEL, "libraries"): StageFacts("cuBLAS is loaded and has its handle and workspace", 0.02),
    (Role.MODEL, "pool"): StageFacts("the KV pool and all step buffers are allocated", 0.02),
    (Role.MODEL, "pool, kernels"): StageFacts(
        "the KV pool and all step buffers are allocated, a kernel is loaded for every operation", 0.06
    ),
    (Role.MODEL, "warm up"): StageFacts("a prefill and a decode ran, their graph is captured", 0.18),
    (Role.MODEL, "wait for weights"): StageFacts("every tensor is resident", waits_for=(Role.LOADER, "")),
    (Role.MODEL, "map weights"): StageFacts(
        "the weights are mapped read-only, and verified if they were before", 0.002
    ),
    (Role.MODEL, "take over"): StageFacts("what the loader had left was loaded and verified"),
    (Role.MODEL, "load weights"): StageFacts("every byte of every tensor was read and copied", expected_rate=48e9),
    (Role.MODEL, "first token"): StageFacts("a prefill and a decode gave finite logits and a token", 0.02),
    (Role.MODEL, "engine"): StageFacts("scheduler and listener are made", 0.005),
    (Role.WEB, "fork"): _FORK,
    (Role.WEB, "process"): _PROCESS,
    (Role.WEB, "uvicorn"): StageFacts("the app has started, the port is listened to", 0.05),
}

NO_FACTS = StageFacts("it ended without an error")
PARENTS = {Role.LOADER: Role.MASTER, Role.ARBITER: Role.MASTER, Role.MODEL: Role.ARBITER, Role.WEB: Role.MASTER}


@dataclass(frozen=True, slots=True)
class ChecklistItem:
    """A step of the ordered checklist that servers of this kind go through, and which of our stages do its work.

    `elsewhere_s`: what it took in the report that this project began with (an A100, Qwen2-7B).
    """

    name: str
    elsewhere_s: float
    stages: tuple[tuple[Role, str], ...]
    note: str


CHECKLIST = (
    ChecklistItem("imports", 0.9, ((Role.MASTER, "imports"), (Role.ARBITER, "imports")), "done before any fork"),
    ChecklistItem("context", 0.8, ((Role.MODEL, "context"),), "made after the last fork: none survives one"),
    ChecklistItem(
        "libraries and kernels",
        3.2,
        ((Role.MODEL, "libraries"), (Role.MODEL, "warm up")),
        "exactly those that a prefill and a decode use; no cuDNN, which the model has no use for",
    ),
    ChecklistItem("autograd off", 0.01, (), "no step records a gradient: nothing to do at the start"),
    ChecklistItem(
        "weights",
        43.0,
        ((Role.LOADER, "allocate"), (Role.LOADER, "weights"), (Role.LOADER, "checksum")),
        "beside everything else, in a process of their own",
    ),
    ChecklistItem("compile", 89.0, (), "nobody waits for a compiler: kernels are built before"),
    ChecklistItem("KV pool", 0.5, ((Role.MODEL, "pool"), (Role.MODEL, "pool, kernels")), "one allocation"),
    ChecklistItem("ready", 0.1, ((Role.MODEL, "first token"),), "a real token was generated"),
)
