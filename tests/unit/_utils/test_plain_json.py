"""Values of users as JSON."""

import itertools

from raylight._utils.plain_json import plain


def test_the_members_of_a_set_have_one_order() -> None:
    members = ("b", 3, ("a", 1), "c", 20)
    written = [plain({"set": set(order), 2: frozenset(order)}) for order in itertools.permutations(members)]
    assert all(
        one == {"set": ["b", "c", ["a", 1], 20, 3], "2": ["b", "c", ["a", 1], 20, 3]} for one in written
    )
