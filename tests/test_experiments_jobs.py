"""Jobs of an experiment: what they need comes first, in one process and in several; one that fails is one line."""

import pytest

from monoblock.errors import ConfigError, InputError
from monoblock.experiments.jobs import Job, carried_out


def written(place, name, *needs):
    assert all((place / need).is_file() for need in needs)
    (place / name).write_text(name)
    yield "begun"
    yield f"{name}: there"


def refused(place):
    yield "begun"
    raise InputError("a line too long; shorten it")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_comes_after_what_it_needs(tmp_path, processes):
    jobs = [
        Job("last", written, (tmp_path, "last", "one", "two"), ("one", "two")),
        Job("two", written, (tmp_path, "two", "one"), ("one",)),
        Job("one", written, (tmp_path, "one")),
    ]
    said = [line for line in carried_out(jobs, processes) if line != "begun"]
    assert said == ["one: there", "two: there", "last: there"]
    with pytest.raises((ConfigError, InputError), match="a line too long; shorten it"):
        list(carried_out([Job("bad", refused, (tmp_path,))], processes))
