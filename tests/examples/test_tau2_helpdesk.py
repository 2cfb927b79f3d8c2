"""The help desk: solved tasks earn 1 and others 0, tools enforce the policy, and facts match whole words."""

import json
import re
from typing import Any

import pytest
from tau2_helpers import TASKS, facts_sentence

from examples.tau2_agent.domain import ToolError, Transcript
from examples.tau2_agent.helpdesk.desk import DeskCase, HelpDesk, read_file
from examples.tau2_agent.helpdesk.grading import changes, is_told, share_told
from examples.tau2_agent.helpdesk.tools import BookingSystem
from examples.tau2_agent.users import PATIENCE, ScriptedUser

DATABASE = json.loads(read_file("db.json"))


def conversation(*texts: str, ending: str = "user") -> Transcript:
    return Transcript([{"role": "assistant", "content": text} for text in texts], ending=ending)


def test_the_database_has_the_documented_size() -> None:
    assert (len(DATABASE["users"]), len(DATABASE["bookings"]), len(TASKS)) == (20, 22, 26)
    assert len(HelpDesk().open(TASKS["desk-01"]).tools) == 6


def test_the_database_is_consistent() -> None:
    for booking in DATABASE["bookings"].values():
        sailing = DATABASE["sailings"][booking["sailing_id"]]
        assert booking["user_id"] in DATABASE["users"]
        assert booking["paid"] == sailing[booking["fare"]] * booking["passengers"] + 40 * booking["vehicle"]
        assert (booking["status"] == "travelled") == (sailing["status"] == "sailed")
    for task in TASKS.values():
        user = next(user for user in DATABASE["users"].values() if user["email"] == task["user"]["email"])
        assert user["name"] == task["user"]["name"]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_gold_actions_solve_the_task(task: dict[str, Any]) -> None:
    case = HelpDesk().open(task)
    seen = [case.policy]
    for action in task["gold"]:
        seen.append(case.call(action["name"], action["arguments"]))
    assert case.changed() == task["expected"]["changes"]
    assert case.grade(conversation(facts_sentence(task))) == {"reward": 1.0, "database": 1.0, "facts": 1.0}
    for fact in task["expected"]["facts"]:  # the assistant can find it
        first = fact.split("|")[0].removeprefix("€")
        assert re.search(rf"(?<!\d){re.escape(first)}(?!\d)", "\n".join(seen)), fact


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_incomplete_solutions_earn_less(task: dict[str, Any]) -> None:
    def solve() -> DeskCase:
        case = HelpDesk().open(task)
        for action in task["gold"]:
            case.call(action["name"], action["arguments"])
        return case

    assert HelpDesk().open(task).grade(conversation())["reward"] == 0.0  # neither actions nor answers
    facts = len(task["expected"]["facts"])
    silent = solve().grade(conversation("Good bye."))
    assert silent == {"reward": 0.0, "database": 1.0, "facts": 0.0}
    assert (
        HelpDesk().open(task).grade(conversation(facts_sentence(task)))["reward"] == 0.0
    )  # also if the policy contains the facts
    first = task["expected"]["facts"][0].split("|")[0]
    assert solve().grade(conversation(f"It is {first}."))["reward"] == pytest.approx(1 / facts)
    assert solve().grade(conversation(facts_sentence(task), ending="steps"))["reward"] == 0.0


def test_an_additional_change_has_reward_0() -> None:
    task = TASKS["desk-01"]
    case = HelpDesk().open(task)
    for action in [*task["gold"], {"name": "cancel_booking", "arguments": {"booking_id": "B2021"}}]:
        case.call(action["name"], action["arguments"])
    assert case.grade(conversation(facts_sentence(task))) == {"reward": 0.0, "database": 0.0, "facts": 1.0}


@pytest.mark.parametrize(
    ("fact", "text", "expected_match"),
    [
        ("€16", "You get 16 euros back.", True),
        ("€16", "You get €16.00 back", True),
        ("€16", "EUR 16, 16€", True),
        ("€16", "that makes 16-euro", True),
        ("€16", "116 euros", False),
        ("€16", "16.50 euros", False),
        ("€16", "€160", False),
        ("€16", "on 16 June", False),
        ("08:00|8 am", "It leaves at 08:00.", True),
        ("08:00|8 am", "at 8 AM", True),
        ("08:00|8 am", "at 18 am", False),
        ("20:00|8 pm", "at 20:001", False),
        ("35", "35 seats are free", True),
        ("35", "S135 has 350 seats", False),
        ("48 hours|48 h", "only until 48 hours before", True),
    ],
)
def test_facts_match_whole_words(fact: str, text: str, expected_match: bool) -> None:
    assert is_told(fact, text) is expected_match


def test_shares_and_changes() -> None:
    assert share_told([], []) == 1.0
    assert share_told(["1", "2"], ["it is 2"]) == 0.5
    assert changes({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == {"a.c": 3, "d": 4}


FIND_7 = ("find_user", {"email": "greta.sundar@post.example"})
FIND_10 = ("find_user", {"email": "jonas.v@post.example"})
FIND_3 = ("find_user", {"email": "chiara.l@post.example"})


@pytest.mark.parametrize(
    ("calls", "refused"),
    [
        ([("sell_ferry", {})], "there is no tool sell_ferry; there are find_user"),
        ([("find_user", {})], "email: Field required"),
        ([("find_user", {"email": "ada.renner@post.example", "x": 1})], "x: Extra inputs"),
        ([("find_user", {"email": "nobody@post.example"})], "no customer has the address"),
        ([("get_booking", {"booking_id": "B2003"})], "look the customer up first"),
        ([FIND_3, ("get_booking", {"booking_id": "B2001"})], "this customer has no booking B2001"),
        ([FIND_3, ("cancel_booking", {"booking_id": "B2003"})], "later than 48 hours"),
        ([FIND_3, ("change_booking", {"booking_id": "B2003", "sailing_id": "S113"})], "later than 24 hours"),
        ([FIND_3, ("give_credit", {"booking_id": "B2003", "amount": 10})], "only for a journey that is over"),
        ([FIND_3, ("give_credit", {"booking_id": "B2003", "amount": 0})], "greater than or equal to 1"),
        (
            [("list_sailings", {"route": "Harwick-Moon", "date": "2025-06-13"})],
            "there is no route Harwick-Moon",
        ),
        (
            [FIND_10, ("change_booking", {"booking_id": "B2010", "sailing_id": "S121"})],
            "0 seats and 0 vehicle spaces left",
        ),
        (
            [FIND_10, ("change_booking", {"booking_id": "B2010", "sailing_id": "S113"})],
            "another crossing of the route Lund-Harwick",
        ),
        (
            [
                ("find_user", {"email": "mira.osei@post.example"}),
                ("change_booking", {"booking_id": "B2013", "sailing_id": "S142"}),
            ],
            "26 seats and 0 vehicle spaces left",
        ),
        (
            [
                ("find_user", {"email": "farid@castell.example"}),
                ("change_booking", {"booking_id": "B2006", "sailing_id": "S116"}),
            ],
            "S116 is cancelled",
        ),
        ([FIND_7, ("cancel_booking", {"booking_id": "B2007"})], "B2007 is travelled"),
        (
            [
                FIND_7,
                ("give_credit", {"booking_id": "B2007", "amount": 10}),
                ("give_credit", {"booking_id": "B2007", "amount": 10}),
            ],
            "has had a credit of 10 already",
        ),
    ],
)
def test_calls_against_the_rules_are_rejected_and_change_nothing(
    calls: list[tuple[str, Any]], refused: str
) -> None:
    desk = BookingSystem(json.loads(read_file("db.json")))
    for name, arguments in calls[:-1]:
        desk.call(name, arguments)
    before = json.dumps(desk.database)
    with pytest.raises(ToolError, match=re.escape(refused)):
        desk.call(*calls[-1])
    assert json.dumps(desk.database) == before


async def test_the_scripted_user_answers_its_script_then_questions_then_leaves() -> None:
    person = HelpDesk().open(TASKS["desk-15"]).person
    user = ScriptedUser(person)
    assert await user.open() == person.opening
    assert await user.answer("What is your e-mail address?") == "It is oona.petrov@post.example."
    assert await user.answer("Sorry, that is not possible.") == person.answers[0][1]
    assert (
        await user.answer("Not possible later than 48 hours, shall I move it?") == "Yes, please."
    )  # each answer is sent once
    assert await user.answer("It is moved.") is None

    for offer in (
        "It is moved. Is there anything else I can do for you?",
        "Done!\nDo you have any other questions? Bye.",
    ):
        assert await ScriptedUser(person).answer(offer) is None
    assert await ScriptedUser(person).answer("Shall I move it? Is there anything else?") == "Yes, please."

    patient = ScriptedUser(person)
    await patient.open()
    answers = [await patient.answer("Really?") for _ in range(PATIENCE)]
    assert answers == ["Yes, please."] * (PATIENCE - 1) + [None]
