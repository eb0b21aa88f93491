"""Predicates that may run: columns, literals, operators, and functions of a list.

A predicate comes from whoever may ask the broker for jobs, and runs in the Java process of the pipeline. So what it is
made of is looked up in lists, before Spark analyses or computes any of it; what stands in none of them is refused.

The lists hold nothing that reaches beyond the row (files, other tables, classes, the environment), nothing that makes
values much longer than it gets, since nested calls of it fill any memory, and no regular expressions, since one row can
keep them busy for ever. `like` can take long, too; beside.py bounds its time.
"""

import json
from typing import Any

from postdate.errors import UsageError

FUNCTIONS = {
    "texts": (
        "char_length", "contains", "crc32", "endswith", "hash", "initcap", "instr", "left", "length", "locate", "lower",
        "ltrim", "md5", "octet_length", "position", "right", "rtrim", "sha1", "sha2", "startswith", "substr",
        "substring", "substring_index", "trim", "upper", "xxhash64",
    ),
    "joined texts": ("concat",),
    "conditions": (
        "between", "coalesce", "equal_null", "greatest", "if", "ifnull", "isnotnull", "isnull", "least", "nullif",
        "nvl", "nvl2",
    ),
    "numbers": (
        "abs", "bigint", "ceil", "ceiling", "double", "floor", "int", "mod", "pmod", "round", "sign",
    ),
    "times": (
        "add_months", "convert_timezone", "current_date", "current_timestamp", "date", "date_add", "date_diff",
        "date_format", "date_part", "date_sub", "date_trunc", "datediff", "day", "dayofmonth", "dayofweek",
        "dayofyear", "extract", "from_utc_timestamp", "hour", "last_day", "make_date", "make_dt_interval",
        "make_interval", "make_timestamp", "minute", "month", "next_day", "now", "quarter", "second", "timestamp",
        "timestamp_millis", "timestamp_seconds", "to_date", "to_timestamp", "to_utc_timestamp", "trunc",
        "try_to_timestamp", "unix_millis", "unix_seconds", "weekday", "weekofyear", "year",
    ),
    "properties and JSON": (
        "array_contains", "element_at", "get_json_object", "map_contains_key", "map_keys", "map_values", "size",
        "try_element_at",
    ),
}  # fmt: skip
CONCAT_MAX = 16  # texts that a predicate joins: one of a message's body may have 4 MiB
NODES_MAX = 8_192  # Spark rewrites all of them again and again

_ALLOWED = frozenset(name for names in FUNCTIONS.values() for name in names)
# What Spark's parser makes of operators, literals, columns, and syntax that other systems write as functions.
_OPERATORS = frozenset({
    "Add", "And", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "CaseWhen", "Cast", "Concat", "Divide",
    "EqualNullSafe", "EqualTo", "GreaterThan", "GreaterThanOrEqual", "ILike", "In", "IntegralDivide", "IsNotNull",
    "IsNotUnknown", "IsNull", "IsUnknown", "LessThan", "LessThanOrEqual", "Like", "LikeAll", "LikeAny", "Literal",
    "Lower", "Multiply", "Not", "NotLikeAll", "NotLikeAny", "Or", "Remainder", "StringLocate", "StringTrim",
    "StringTrimBoth", "StringTrimLeft", "StringTrimRight", "Substring", "Subtract", "TimestampAdd", "TimestampDiff",
    "UnaryMinus", "UnaryPositive", "UnresolvedAttribute", "UnresolvedExtractValue",
})  # fmt: skip
_NAMES_OF_USERS = frozenset({"[current_user]", "[session_user]", "[user]"})  # functions, if no column has the name
_SUBQUERIES = frozenset({"Exists", "InSubquery", "LateralSubquery", "ListQuery", "ScalarSubquery"})
_PACKAGE = "org.apache.spark.sql.catalyst."
_FUNCTION, _CONCAT = "UnresolvedFunction", "Concat"


class NotAllowed(UsageError):
    """A predicate that may not run."""


def check_predicate(spark: Any, where: str) -> None:
    """Raises NotAllowed where a predicate is made of more than the lists allow, ParseException where it is none. Spark
    parses it for that, and does nothing else with it.
    """
    joined = count = 0
    parsed = spark._jsparkSession.sessionState().sqlParser().parseExpression(where)
    for node in json.loads(parsed.toJSON()):  # a subquery is a node, what it holds is none
        count += 1
        name = _check_node(node)
        joined += node["num-children"] if name in ("concat", _CONCAT) else 0
    if joined > CONCAT_MAX:
        raise NotAllowed(f"a predicate may not join {joined} texts: it joins {CONCAT_MAX} at most")
    if count > NODES_MAX:
        raise NotAllowed(f"a predicate may not have {count} parts: it has {NODES_MAX} at most")


def _check_node(node: dict[str, Any]) -> str:
    """Returns the name of an allowed node, or of the function that it calls. Raises NotAllowed."""
    kind = str(node["class"])
    name = kind.rpartition(".")[2].partition("$")[0]
    if name == _FUNCTION:
        called = str(node["nameParts"])[1:-1]  # [substring], or [system, builtin, substring]
        if called.lower() not in _ALLOWED:
            raise _not_allowed(f"call {called[:64]}")
        return called.lower()
    if name == "UnresolvedAttribute" and str(node["nameParts"]).lower() in _NAMES_OF_USERS:
        raise _not_allowed(f"use {str(node['nameParts'])[1:-1].lower()}")
    if name in _SUBQUERIES:
        raise _not_allowed("hold a subquery")
    if name not in _OPERATORS or not kind.startswith(_PACKAGE):
        raise _not_allowed(f"use {'rlike' if name == 'RLike' else name}")
    return str(name)


def _not_allowed(what: str) -> NotAllowed:
    return NotAllowed(
        f"a predicate may not {what}: it is made of columns, literals, operators and the functions that docs/future.md "
        "lists"
    )
