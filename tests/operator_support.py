"""What tests of the operators that take whole steps on a CPU share."""

from weakref import WeakKeyDictionary

from monoblock.decoding import prepare, step_cpu


def watched(monkeypatch):
    """A list that grows by one a step: whether the operator took it.  Toys are given to it too."""
    taken, run = [], step_cpu.Whole.__call__

    def noted(self, *given):
        found = run(self, *given)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(step_cpu.Whole, "__call__", noted)
    monkeypatch.setattr(prepare, "LARGE", 0)
    monkeypatch.setattr(prepare, "TWINS_MADE", WeakKeyDictionary())  # no twin that was made while toys were too small
    return taken
