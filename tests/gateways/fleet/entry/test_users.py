"""The user of a client on the nodes, by the entry's rules."""

from __future__ import annotations

import os

import pytest

from inferd.backends.errors import InvalidArgument, PermissionDenied
from inferd.gateways.fleet.config import UserRules, name_of, user_on_nodes

NAMES = UserRules()
ACCOUNTS = UserRules(users="accounts")
RULES = UserRules(operators=("boss",), delegates=("gateway", "other"))


@pytest.mark.parametrize(
    ("uid", "name", "rules", "found"),
    [
        (1004, "ada", NAMES, "@ada"),
        (1004, "ada", ACCOUNTS, "ada"),
        (0, "root", NAMES, ""),
        (os.getuid(), "inferd", ACCOUNTS, ""),
        (1005, "boss", RULES, ""),
        (1006, "1006", NAMES, "@1006"),
    ],
)
def test_a_user_acts_under_the_own_name(uid: int, name: str, rules: UserRules, found: str) -> None:
    assert user_on_nodes(uid, name, "", rules) == found


def test_gateways_own_users_are_apart_from_each_other_and_from_users_of_the_machine() -> None:
    users = {
        user_on_nodes(1007, "gateway", "@ada", RULES),
        user_on_nodes(1008, "other", "@ada", RULES),
        user_on_nodes(0, "root", "@ada", RULES),
        user_on_nodes(1004, "ada", "", RULES),
    }
    assert len(users) == 4


def test_a_gateway_may_act_on_behalf_of_users_of_the_machine() -> None:
    assert user_on_nodes(1007, "gateway", "ada", RULES) == "@ada"
    assert user_on_nodes(0, "root", "0", NAMES) == "@root"
    assert user_on_nodes(0, "root", "ada", ACCOUNTS) == "ada"


def test_others_may_not_act_on_behalf_of_anybody() -> None:
    with pytest.raises(PermissionDenied) as caught:
        user_on_nodes(1004, "ada", "@bob", RULES)
    assert caught.value.data["right"] == "delegate"


def test_a_name_that_becomes_too_long_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        user_on_nodes(1007, "gateway", "@" + "a" * 127, RULES)


def test_a_user_without_a_name_is_a_number() -> None:
    assert name_of(0) == "root"
    assert name_of(3_999_999_999) == "3999999999" and name_of(1 << 70) == str(1 << 70)
