"""Which places of a machine the next attempt takes."""

from __future__ import annotations

import pytest

from forge_train_tools.launching.places import DEVICES, Places

pytestmark = [pytest.mark.unit]


def test_a_place_that_fails_twice_in_a_row_is_left_out_once() -> None:
    places = Places(4, smaller=(1, 2))
    history = []
    for failed in ([3], [3], [1], [3], [0], [2], [2]):
        places.after(failed)
        history.append((places.used, places.lost))
    everything = ((0, 1, 2, 3), ())
    assert history == [
        everything,
        ((0, 1), (3,)),  # three are too many
        everything,  # whatever the reason: it grows back
        ((0, 1), (3,)),  # lost before: once is enough
        everything,
        everything,  # another one, for the first time
        ((0, 1), (2,)),
    ]


def test_the_places_that_are_left_keep_their_devices() -> None:
    places = Places(4, smaller=(2, 3))
    for _ in range(2):
        places.after([1])
    assert (places.used, places.lost) == ((0, 2, 3), (1,))
    for before, during in ((None, "0,2,3"), ("7,5,3,1", "7,3,1"), ("", ""), ("0", "0")):
        environment = {DEVICES: before} if before is not None else {}
        known = dict(environment)
        with places.devices(environment):
            assert environment[DEVICES] == during
        assert environment == known
    with Places(2).devices(environment := {}):
        assert environment == {}


@pytest.mark.parametrize("smaller", [(), (2,)])
def test_what_is_no_fault_of_a_place(smaller: tuple[int, ...]) -> None:
    places = Places(3, smaller=smaller)
    for failed in ([0, 1, 2], [0, 1, 2], [], [1], [2], [1]):  # all of them, none, and not in a row
        places.after(failed)
        assert places.used == (0, 1, 2)
    two = Places(3, smaller=smaller)
    for _ in range(2):
        two.after([0, 1])
    assert two.used == (0, 1, 2), "one would be left"
