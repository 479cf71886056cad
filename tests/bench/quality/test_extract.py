"""The rules by which answers are read, on the spellings that models write."""

import pytest

from flashstep.bench.quality.extract import Rule, expected, extract, is_right, numbers, value


@pytest.mark.parametrize(
    ("text", "last", "worth"),
    [
        ("The answer is 42.", "42", 42),
        ("so 9 * 9 = 81. Then, 13 + 81 = 94 balls.", "94", 94),
        ("It costs $1,234.50 in total", "$1,234.50", 1234.5),
        ("-$5", "-$5", -5),
        ("= -3", "-3", -3),
        ("\u22127 degrees", "\u22127", -7),
        ("from 10-3", "3", 3),
        ("(12)-4", "4", 4),
        ("room B-12", "12", 12),
        ("12%", "12", 12),
        ("5km", "5", 5),
        ("3.0", "3.0", 3),
        (".5", ".5", 0.5),
        ("1,2,3", "3", 3),
        ("1,234,567", "1,234,567", 1234567),
        ("1,2345", "2345", 2345),
        ("6.02e23", "6.02e23", 6.02e23),
        ("2e", "2", 2),
        ("1/2", "2", 2),
        ("\u20ac 12", "\u20ac 12", 12),
        ("**94**", "94", 94),
    ],
)
def test_last_number(text: str, last: str, worth: float) -> None:
    assert extract(text, Rule.NUMBER, "1") == last
    assert float(value(last)) == worth


def test_no_number() -> None:
    assert numbers("none at all") == []
    assert extract("none at all", Rule.NUMBER, "1") is None
    assert not is_right(None, "1", Rule.NUMBER)


@pytest.mark.parametrize(
    ("rule", "text", "wanted", "found", "right"),
    [
        (Rule.HASHES, "6 + 3 = 9\n#### 9", "9", "9", True),
        (Rule.HASHES, "#### 1\nno: #### $1,000.00 dollars", "1000", "$1,000.00", True),
        (Rule.HASHES, "the answer is 9", "9", None, False),
        (Rule.HASHES, "#### nine", "9", None, False),
        (Rule.BOXED, r"thus \boxed{\frac{1}{2}} done", r"\frac{1}{2}", r"\frac{1}{2}", True),
        (Rule.BOXED, r"\boxed{3} or \boxed{ 42.0 }", "42", "42.0", True),
        (Rule.BOXED, r"\boxed{42", "42", None, False),
        (Rule.BOXED, r"\boxed{}", "42", None, False),
        (Rule.BOXED, "42", "42", None, False),
        (Rule.BOXED, r"\boxed{x  + 1}", "x + 1", "x  + 1", True),
        (Rule.NUMBER, "about 94.0 balls", "94", "94.0", True),
        (Rule.NUMBER, "94 balls, no: 95", "94", "95", False),
        (Rule.EXACT, "  blue \n", "blue", "blue", True),
        (Rule.EXACT, "Blue", "blue", "Blue", False),
        (Rule.EXACT, " ", "blue", None, False),
        (Rule.CONTAINS, "The code is 1234.", "1234", "1234", True),
        (Rule.CONTAINS, "The code is 12345.", "1234", None, False),
        (Rule.CONTAINS, "it is a.b", "a.b", "a.b", True),
        (Rule.CONTAINS, "it is axb", "a.b", None, False),
    ],
)
def test_rules(rule: Rule, text: str, wanted: str, found: str | None, right: bool) -> None:
    assert extract(text, rule, wanted) == found
    assert is_right(found, wanted, rule) is right


def test_calls_are_compared_by_meaning() -> None:
    wanted = expected('{"name": "calc", "arguments": {"a": 1, "b": "2"}}', Rule.CALL)
    same = extract('{"arguments":{"b":"2","a":1},"name":"calc"}', Rule.CALL, wanted)
    other = extract('{"name": "calc", "arguments": {"a": 1, "b": 2}}', Rule.CALL, wanted)
    assert is_right(same, wanted, Rule.CALL) and not is_right(other, wanted, Rule.CALL)
    assert extract("12", Rule.CALL, wanted) is None
    assert extract("{broken", Rule.CALL, wanted) is None


def test_what_a_question_asks_for() -> None:
    public = "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 1,072"
    assert expected(public, Rule.NUMBER) == "1,072"
    assert is_right("1072", expected(public, Rule.NUMBER), Rule.NUMBER)
    assert expected(" blue ", Rule.EXACT) == "blue"
    for answer, rule in (
        ("blue", Rule.NUMBER),
        ("", Rule.EXACT),
        ("#### ", Rule.CONTAINS),
        ("12", Rule.CALL),
    ):
        with pytest.raises(ValueError, match=r"number|empty|call"):
            expected(answer, rule)
