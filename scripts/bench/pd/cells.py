"""What a scene found, and the list of scenes."""
from dataclasses import dataclass, field

SCENES = []


@dataclass
class Scene:
    """`modes`: "alone", "supervised"; `quick`: those in which it is part of the short run; `run(stand)` gives a Cell."""
    column: str
    run: object
    modes: tuple
    engines: tuple
    quick: tuple


def scene(column, modes=("alone", "supervised"), engines=("sglang", "vllm"), quick=()):
    """Registers a coroutine function of a stand as the scene of this column."""
    def register(function):
        SCENES.append(Scene(column, function, modes, engines, quick))
        return function
    return register


@dataclass
class Cell:
    """What is printed. `wrong`: behaviour that is not as it has to be; `late`: times over their target."""
    parts: list = field(default_factory=list)      # (short, long) texts
    wrong: list = field(default_factory=list)
    late: list = field(default_factory=list)

    @property
    def text(self):
        return ", ".join(long for _, long in self.parts)

    @property
    def short(self):
        return ", ".join(short for short, _ in self.parts if short)

    @property
    def verdict(self):
        return "FAIL" if self.wrong else "MISS" if self.late else "pass"

    def say(self, short, long=""):
        self.parts.append((short, long or short))

    def expect(self, true, what):
        if not true:
            self.wrong.append(what)

    def outcome(self, name, answer, *wanted):
        """How a request ended, which has to be one of `wanted`."""
        self.say(f"{name} {answer.outcome}".strip())
        self.expect(answer.outcome in wanted,
                    f"{name} ended as {answer.outcome} in {answer.seconds:.2f} s: {answer.error or ''}")

    def figure(self, name, seconds, target):
        """A time with its target, seconds; None: it never came, which is wrong."""
        if seconds is None:
            self.say(f"{name} never")
            self.wrong.append(f"{name}: never")
            return
        late = seconds > target
        short = f"{name} {max(seconds, 0.0):.{3 if target < 1 else 2}f} s"
        self.say(short, f"{short} (target {target:g}{', MISS' if late else ''})")
        if late:
            self.late.append(f"{name}: {seconds:.3f} s, target {target:g} s")

    def load(self, answers, normal, bound):
        """A steady load: none may fail, and the slowest good answer may take `bound` seconds more than the normal one."""
        failed = [answer for answer in answers if not answer.good]
        kinds = ", ".join(sorted({answer.outcome for answer in failed}))
        self.say(f"{len(failed)}/{len(answers)} failed" + (f" ({kinds})" if kinds else ""))
        self.expect(not failed, f"{len(failed)} of {len(answers)} failed: {kinds}; {next((a.error for a in failed), '')}")
        slowest = max((answer.seconds for answer in answers if answer.good), default=0.0)
        self.figure(f"slowest good {slowest:.2f} s, over normal", slowest - normal, bound)
