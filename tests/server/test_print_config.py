"""What --print-config prints is the configuration: read again it is the same, whatever was set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import tomllib
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from eagle_eye.schema.configuration import ConfigurationError, load, masked
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.history.settings import RemoteStoreSettings

# Everything that a TOML file can hold.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Return plain values of a type that a configuration uses, within its limits."""
    match kind:
        case inspect.FloatType():
            least = kind.ge if kind.ge is not None else kind.gt
            open_below = kind.gt is not None
            floats = st.floats(least, kind.le, exclude_min=open_below, allow_nan=False)
            return floats if least is not None else st.floats(allow_nan=False)
        case inspect.IntType():
            return st.integers(kind.ge, kind.le if kind.ge is None else kind.le or 2**63 - 1)
        case inspect.BoolType():
            return st.booleans()
        case inspect.StrType():
            return TEXTS.filter(lambda text: len(text) >= (kind.min_length or 0))
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.ListType() | inspect.VarTupleType():
            return st.lists(values(kind.item_type), min_size=kind.min_length or 0, max_size=2)
        case inspect.DictType():
            return st.dictionaries(TEXTS, values(kind.value_type), max_size=2)
        case inspect.UnionType():
            return st.one_of(*(values(one) for one in kind.types if not isinstance(one, inspect.NoneType)))
        case inspect.StructType():
            required = {field.encode_name: values(field.type) for field in kind.fields if field.required}
            optional = {field.encode_name: values(field.type) for field in kind.fields if not field.required}
            return st.fixed_dictionaries(required, optional=optional)
    raise AssertionError(f"no values for {kind}; say here what they are")


@settings(max_examples=40)
@given(plain=values(inspect.type_info(ServerConfig)))
def test_what_is_printed_is_read_as_the_same(plain: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        config = msgspec.convert(plain, ServerConfig)
    except msgspec.ValidationError:  # what no type says: a window that ends before it begins
        assume(False)
    file = tmp_path_factory.getbasetemp() / "printed.toml"
    file.write_text(tomli_w.dumps(msgspec.to_builtins(config)), encoding="utf-8")
    assert load(ServerConfig, file, {}, {}) == config


def test_a_printed_secret_keeps_its_name_and_is_not_taken_for_one(tmp_path: Path) -> None:
    config = ServerConfig(remote_store=RemoteStoreSettings(headers={"X-Scope-OrgID": "sesame", "a.b": "c"}))
    printed = tomli_w.dumps(masked(config))
    assert "sesame" not in printed
    assert tomllib.loads(printed)["remote_store"]["headers"] == {"X-Scope-OrgID": "********", "a.b": "********"}
    file = tmp_path / "server.toml"
    file.write_text(printed)
    with pytest.raises(ConfigurationError, match=r"remote_store\.headers\.X-Scope-OrgID: expected the secret itself"):
        load(ServerConfig, file, {}, {})
