"""Settings validated by pydantic models; what is wrong is told in the one line of :func:`input_error`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from itm_utils.errors import ItmError, input_error

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(ge=1e-12)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Settings(BaseModel):
    """Base of every model of settings: exact types (a whole number is a number too), no unknown names, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def settings_model(name: str, fields: Mapping[str, tuple[Any, Any]]) -> type[Settings]:
    """A model from name → (annotation, default)."""
    given: dict[str, Any] = dict(fields)
    return create_model(name, __base__=Settings, **given)


def validated(model: type[Settings], values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values, and the defaults of those not given, with the types of the model; the first error is raised.

    where: what the message begins with, besides the name of the setting.
    """
    try:
        return dict(model.model_validate(dict(values)))
    except ValidationError as error:
        raise explained(model, error.errors()[0], where) from None


def explained(model: type[Settings], error: Mapping[str, Any], where: str) -> ItmError:
    """One error of pydantic in our form."""
    name, value = str(error["loc"][0]), error["input"]
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, model.model_fields, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(model.model_fields)}."
        return input_error(where or model.__name__, f"the parameter {name}", "one that the chapter has", hint)
    limits = number_limits(model, name)
    kind: Any = model.model_fields[name].annotation
    if error["type"] in ("int_type", "float_type", "bool_type", "string_type"):
        expected = f"a value of type {kind.__name__}" + (f": {limits}" if limits else "")
        return input_error(where or name, f"{name} = {value!r}", expected)
    if error["type"] == "literal_error":
        limits = f"one of {', '.join(kind.__args__)}"
    return input_error(f"{where}, {name}" if where else name, repr(value), limits or "a finite number")


def number_limits(model: type[Settings], name: str) -> str:
    """What a number of a model must be, in words; empty if anything goes."""
    field = model.model_fields[name]
    least, above, most = (
        next((getattr(rule, key) for rule in field.metadata if hasattr(rule, key)), None) for key in ("ge", "gt", "le")
    )
    what = "a whole number" if field.annotation is int else "a number"
    if least is not None:
        return f"{what} from {least:g} up"
    return f"{what} above {above:g}, at most {most:g}" if above is not None else ""
