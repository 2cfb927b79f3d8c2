"""Six tools of the help desk. They enforce the rules of the policy that a booking system would enforce."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from examples.tau2_agent.domain import ToolError

VEHICLE_PRICE = 40
CHANGE_FEE = 15
CHANGE_HOURS, CANCEL_HOURS = 24, 48
"""Hours before departure until which a saver fare can be changed and cancelled."""
MOST_CREDIT = 100

BookingId = Annotated[str, Field(description="Number of a booking, such as B2001.")]


class Arguments(BaseModel):
    """Base class of a tool's arguments; the docstring is the tool's description for the assistant."""

    model_config = ConfigDict(extra="forbid", title=None)


class FindUser(Arguments):
    """Look a customer up by e-mail address: name, level, credit, and bookings.

    This has to come before anything about a booking.
    """

    email: str = Field(description="The address that the customer gives.")


class GetBooking(Arguments):
    """A booking of this customer, with its crossing and the hours left until departure."""

    booking_id: BookingId


class ListSailings(Arguments):
    """The crossings of a route on a day, with times, fares for one passenger, and what is free."""

    route: str = Field(description="From and to, such as Harwick-Lund.")
    date: str = Field(description="The day, as 2025-06-13.")


class ChangeBooking(Arguments):
    """Move a booking to another crossing of the same route. Tells what is paid; less than 0 is paid back."""

    booking_id: BookingId
    sailing_id: str = Field(description="Number of the new crossing, such as S113.")


class CancelBooking(Arguments):
    """Cancel a booking. Tells what is refunded."""

    booking_id: BookingId


class GiveCredit(Arguments):
    """Add a credit for the delay of a journey to the customer's balance."""

    booking_id: BookingId
    amount: int = Field(ge=1, le=MOST_CREDIT, description="Whole euros.")


class BookingSystem:
    """Booking system of one conversation.

    Args:
        database: changed in place; its `contact` is the customer who was looked up last.
    """

    def __init__(self, database: dict[str, Any]) -> None:
        self.database = database
        self._now = datetime.fromisoformat(database["now"])
        self._tools: dict[str, tuple[type[Arguments], Callable[[Any], dict[str, Any] | list[Any]]]] = {
            "find_user": (FindUser, self._find_user),
            "get_booking": (GetBooking, self._get_booking),
            "list_sailings": (ListSailings, self._list_sailings),
            "change_booking": (ChangeBooking, self._change_booking),
            "cancel_booking": (CancelBooking, self._cancel_booking),
            "give_credit": (GiveCredit, self._give_credit),
        }

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools in OpenAI's format."""
        return [
            {
                "type": "function",
                "function": {"name": name, "description": kind.__doc__, "parameters": _schema(kind)},
            }
            for name, (kind, _) in self._tools.items()
        ]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool; returns JSON.

        Raises:
            ToolError: the tool is unknown, its arguments are wrong, or a rule forbids the call; nothing was
                changed.
        """
        if name not in self._tools:
            raise ToolError(f"there is no tool {name:.100}; there are {', '.join(self._tools)}")
        kind, tool = self._tools[name]
        try:
            given = kind(**arguments)
        except (ValidationError, TypeError) as error:
            raise ToolError(f"the arguments of {name} do not fit: {_explain(error)}") from None
        return json.dumps(tool(given), ensure_ascii=False)

    def _find_user(self, given: FindUser) -> dict[str, Any]:
        for user in self.database["users"].values():
            if user["email"] == given.email.strip().lower():
                self.database["contact"] = user["id"]
                own = [
                    booking["id"]
                    for booking in self.database["bookings"].values()
                    if booking["user_id"] == user["id"]
                ]
                return user | {"bookings": own}
        raise ToolError(f"no customer has the address {given.email:.100}")

    def _get_booking(self, given: GetBooking) -> dict[str, Any]:
        booking, sailing = self._own(given.booking_id)
        return booking | {"sailing": sailing, "hours_to_departure": round(self._hours(sailing), 1)}

    def _list_sailings(self, given: ListSailings) -> list[dict[str, Any]]:
        sailings = self.database["sailings"].values()
        if given.route not in (routes := sorted({sailing["route"] for sailing in sailings})):
            raise ToolError(f"there is no route {given.route:.100}; there are {', '.join(routes)}")
        return [
            sailing
            for sailing in sailings
            if (sailing["route"], sailing["date"]) == (given.route, given.date)
        ]

    def _change_booking(self, given: ChangeBooking) -> dict[str, Any]:
        booking, old = self._own(given.booking_id)
        new = self.database["sailings"].get(given.sailing_id)
        if new is None:
            raise ToolError(f"there is no crossing {given.sailing_id:.100}")
        self._must_be_open(booking, old)
        if new["route"] != old["route"] or new["id"] == old["id"]:
            raise ToolError(f"a booking can only be moved to another crossing of the route {old['route']}")
        if new["status"] != "scheduled" or self._hours(new) <= 0:
            raise ToolError(f"{new['id']} is {new['status']} and cannot be booked")
        if booking["fare"] == "saver" and self._hours(old) < CHANGE_HOURS:
            raise ToolError(
                f"a saver fare cannot be changed later than {CHANGE_HOURS} hours before departure"
            )
        if new["seats"] < booking["passengers"] or new["vehicle_spaces"] < booking["vehicle"]:
            raise ToolError(
                f"{new['id']} has {new['seats']} seats and {new['vehicle_spaces']} vehicle spaces left, too "
                "few"
            )
        price = new[booking["fare"]] * booking["passengers"] + VEHICLE_PRICE * booking["vehicle"]
        difference = price - booking["paid"]
        charge = difference if booking["fare"] == "flex" else max(difference, 0) + CHANGE_FEE
        self._take_seats(old, booking, -1)
        self._take_seats(new, booking, 1)
        booking.update(sailing_id=new["id"], paid=booking["paid"] + charge)
        return {"booking_id": booking["id"], "charged": charge, "sailing": new}

    def _cancel_booking(self, given: CancelBooking) -> dict[str, Any]:
        booking, sailing = self._own(given.booking_id)
        self._must_be_open(booking, sailing)
        full = booking["fare"] == "flex" or sailing["status"] == "cancelled"
        if not full and self._hours(sailing) < CANCEL_HOURS:
            raise ToolError(
                f"a saver fare cannot be cancelled later than {CANCEL_HOURS} hours before departure"
            )
        refund = booking["paid"] if full else booking["paid"] // 2
        self._take_seats(sailing, booking, -1)
        booking.update(status="cancelled", refund=refund)
        return {"booking_id": booking["id"], "status": "cancelled", "refund": refund}

    def _give_credit(self, given: GiveCredit) -> dict[str, Any]:
        booking, _ = self._own(given.booking_id)
        if booking["status"] != "travelled":
            raise ToolError("there is credit only for a journey that is over")
        if booking["credit"]:
            raise ToolError(f"{booking['id']} has had a credit of {booking['credit']} already")
        booking["credit"] = given.amount
        user = self.database["users"][booking["user_id"]]
        user["credit"] += given.amount
        return {"booking_id": booking["id"], "credit": given.amount, "balance": user["credit"]}

    def _own(self, booking_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a booking of the customer who was looked up, and its crossing."""
        customer = self.database["contact"]
        if customer is None:
            raise ToolError("look the customer up first, with find_user")
        booking = self.database["bookings"].get(booking_id)
        if booking is None or booking["user_id"] != customer:
            raise ToolError(f"this customer has no booking {booking_id:.100}")
        return booking, self.database["sailings"][booking["sailing_id"]]

    def _must_be_open(self, booking: dict[str, Any], sailing: dict[str, Any]) -> None:
        if booking["status"] != "confirmed":
            raise ToolError(
                f"{booking['id']} is {booking['status']}; only a confirmed booking can be changed or "
                "cancelled"
            )
        if self._hours(sailing) <= 0:
            raise ToolError(f"{sailing['id']} has left; its bookings can no longer be changed or cancelled")

    def _hours(self, sailing: dict[str, Any]) -> float:
        """Hours until departure."""
        return (
            datetime.fromisoformat(f"{sailing['date']} {sailing['departs']}") - self._now
        ).total_seconds() / 3600

    @staticmethod
    def _take_seats(sailing: dict[str, Any], booking: dict[str, Any], sign: int) -> None:
        sailing["seats"] -= sign * booking["passengers"]
        sailing["vehicle_spaces"] -= sign * booking["vehicle"]


def _schema(kind: type[Arguments]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, without pydantic's titles."""
    schema = kind.model_json_schema()
    fields = {
        name: {k: v for k, v in field.items() if k != "title"} for name, field in schema["properties"].items()
    }
    return {
        "type": "object",
        "properties": fields,
        "required": schema["required"],
        "additionalProperties": False,
    }


def _explain(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
