"""Settings of a policy update by their flat keys, which are verl's."""

from typing import Any

from pydantic import BaseModel

from raylight.experience.settings.policy_settings import TABLES

FLAT_KEYS = {key for table in TABLES for key in (table.selector, *table._readers())}


def flat_settings(settings: BaseModel | type[BaseModel]) -> dict[str, Any]:
    """Return the settings of an instance, or the defaults of a class, with variants' settings flattened."""
    if isinstance(settings, type):
        values = {
            name: field.get_default(call_default_factory=True)
            for name, field in settings.model_fields.items()
        }
    else:
        values = {name: getattr(settings, name) for name in type(settings).model_fields}
    for table in TABLES:
        variant = values.pop(table.field, None)
        if isinstance(variant, BaseModel):
            given = variant.model_dump()
            values |= {table.selector: given.pop("name"), **given}
        elif isinstance(settings, type) and table.field in settings.model_fields:  # it has no default
            values |= {
                key: field.default
                for key, field in settings.model_fields[table.field].annotation.model_fields.items()
            }
            values[table.selector] = values.pop("name")
    return values
