"""Two-step problems put together from parts: a start, two events and a question, each in many wordings and two tenses.

Unlike the fixed shapes of ``train.problems`` no sentence decides the operators alone, so that verbs have to be read.
Gives (question, first step, second step, unit); the caller writes reasoning and answer.
"""

import random
from typing import NamedTuple

from train.words import NAMES, THINGS, WOMEN

Step = tuple[str, int]  # operator and right operand, applied to what came before


class Story(NamedTuple):
    """``chain``: start value and two steps on it; or ``inner``: first step on its own, then start (op) its result."""

    question: str
    start: int
    first: tuple[int, str, int]
    second: str  # operator of the second step
    last: (
        int | None
    )  # right operand of the second step; None: the first result is the right operand, ``start`` the left
    unit: str


# verbs as (present, past); {b} is the number, {m} another person, {x} the things
GAIN = (
    ("buys {b} more", "bought {b} more"), ("finds {b} more {x}", "found {b} more {x}"), ("gets {b} from {m}", "got {b} from {m}"),
    ("makes {b} more", "made {b} more"), ("collects {b} more {x}", "collected {b} more {x}"), ("wins {b} more", "won {b} more"),
    ("picks up {b} more {x}", "picked up {b} more {x}"), ("receives {b} new {x}", "received {b} new {x}"),
    ("takes {b} from {m}", "took {b} from {m}"), ("buys another {b} {x}", "bought another {b} {x}"), ("adds {b}", "added {b}"),
)  # fmt: skip
LOSS = (
    ("eats {b} of them", "ate {b} of them"), ("loses {b}", "lost {b}"), ("gives {b} to {m}", "gave {b} to {m}"),
    ("gives away {b} {x}", "gave away {b} {x}"), ("sells {b}", "sold {b}"), ("uses {b} {x}", "used {b} {x}"),
    ("throws away {b}", "threw away {b}"), ("drops {b} of them", "dropped {b} of them"), ("breaks {b} {x}", "broke {b} {x}"),
    ("eats {b}", "ate {b}"), ("sends {b} to {m}", "sent {b} to {m}"), ("hides {b}", "hid {b}"), ("donates {b} {x}", "donated {b} {x}"),
)  # fmt: skip
OTHER_GAIN = (
    ("{m} gives {o} {b} more", "{m} gave {o} {b} more"), ("{b} more {x} arrive", "{b} more {x} arrived"),
    ("a friend brings {b} more", "a friend brought {b} more"), ("{b} new ones come", "{b} new ones came"),
)  # fmt: skip
OTHER_LOSS = (
    ("{m} takes {b} of them", "{m} took {b} of them"), ("{b} of them break", "{b} of them broke"), ("{b} are lost", "{b} were lost"),
    ("{b} {x} fall down", "{b} {x} fell down"), ("{b} of them go away", "{b} of them went away"),
)  # fmt: skip
LINKS = (
    ". Then {s} ",
    " and then {v} ",
    ", and {v} ",
    ". After that, {s} ",
    ". Later {s} ",
    " and {v} ",
    " but {v} ",
)
OPENINGS = (("{n} has {a} {x}", "{n} had {a} {x}"), ("{n} owns {a} {x}", "{n} owned {a} {x}"), ("{n} starts with {a} {x}", "{n} started with {a} {x}"),
            ("{n} picks {a} {x}", "{n} picked {a} {x}"), ("{n} buys {a} {x}", "{n} bought {a} {x}"), ("{n} makes {a} {x}", "{n} made {a} {x}"))  # fmt: skip
ENDS = (
    "How many {x} does {n} have now?", "How many {x} does {n} have left?", "How many {x} does {s} have now?", "How many {x} does {s} have?",
    "How many {x} does {n} have in the end?", "How many {x} does {s} have in total?", "How many {x} are there now?", "How many {x} remain?",
    "How many {x} are left?", "How many {x} does {n} have?",
)  # fmt: skip
PLACES = (
    ("A bus has {a} passengers", "passengers", ("{b} get on", "{b} more people get on"), ("{b} get off", "{b} people get off")),
    ("There are {a} birds in a tree", "birds", ("{b} more birds come", "{b} birds join them"), ("{b} birds fly away", "{b} of them fly off")),
    ("A library has {a} books", "books", ("it buys {b} new books", "{b} books come back"), ("{b} books are lent out", "it gives away {b} old books")),
    ("A class has {a} students", "students", ("{b} new students join", "{b} more students come"), ("{b} students leave", "{b} students go home")),
    ("A shop has {a} {x}", "{x}", ("it receives {b} new {x}", "{b} more {x} arrive"), ("it sells {b} {x}", "{b} of them are sold")),
    ("There are {a} {x} in a box", "{x}", ("{n} puts in {b} more", "{b} more are added"), ("{n} takes out {b}", "{b} are taken out")),
    ("A farmer has {a} eggs", "eggs", ("he collects {b} more", "the hens lay {b} more"), ("he sells {b} eggs", "{b} of them break")),
    ("A pond has {a} fish", "fish", ("{b} more fish are put in", "{b} new fish come"), ("{b} fish are caught", "{n} catches {b} fish")),
    ("A parking lot has {a} cars", "cars", ("{b} more cars arrive", "{b} cars come in"), ("{b} cars leave", "{b} cars drive away")),
)  # fmt: skip
PLACE_LINKS = (
    ". Then ",
    " and then ",
    ". At noon ",
    ", and ",
    ". After that ",
    ". Later ",
    " and ",
    ". First ",
    ". At the first stop ",
)
PLACE_ENDS = (
    "How many {x} are there now?",
    "How many {x} are left?",
    "How many {x} are there in the end?",
    "How many {x} does that make?",
    "How many {x} remain?",
)
SINGLE = {
    "boxes": "box",
    "bags": "bag",
    "baskets": "basket",
    "packs": "pack",
    "jars": "jar",
    "crates": "crate",
    "shelves": "shelf",
    "rows": "row",
    "plates": "plate",
}
GROUPS = (
    "{b} {ks} with {c} {x} each", "{b} {ks} of {c} {x}", "{b} {ks} with {c} {x} in each {k}", "{b} {ks}, each with {c} {x}", "{b} {ks} that hold {c} {x} each",
)  # fmt: skip


def _words(rng: random.Random) -> dict[str, str]:
    n, m = rng.sample(NAMES, 2)
    ks = rng.choice(list(SINGLE))
    return {
        "n": n, "m": m, "x": rng.choice(THINGS), "s": "she" if n in WOMEN else "he", "o": "her" if n in WOMEN else "him",
        "p": "her" if n in WOMEN else "his", "ks": ks, "k": SINGLE[ks],
    }  # fmt: skip


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _event(rng: random.Random, op: str, b: int, w: dict[str, str], tense: int) -> str:
    """Link and event of a person's story, from the end of the sentence before it."""
    if rng.random() < 0.25:
        text = rng.choice(OTHER_GAIN if op == "+" else OTHER_LOSS)[tense].format(b=b, **w)
        return rng.choice((". Then ", ". Later ", ". After that ", " and ", ", and then ", ". ")) + text
    verb = rng.choice(GAIN if op == "+" else LOSS)[tense].format(b=b, **w)
    link = rng.choice(LINKS)
    subject = w["n"] if rng.random() < 0.3 else w["s"]
    return link.format(s=f"{subject} {verb}", v=verb).rstrip()


def _sentences(text: str) -> str:
    """Capital letters after full stops."""
    return ". ".join(_capital(part) for part in text.split(". "))


def running(rng: random.Random) -> Story:
    """A holder's count changes twice by plus and minus."""
    w, tense = _words(rng), int(rng.random() < 0.45)
    one, two = rng.choice("+-"), rng.choice("+-")
    a = rng.randint(2, 20) if rng.random() < 0.3 else rng.randint(10, 120)
    b = rng.randint(1, 60) if one == "+" else rng.randint(1, max(1, a - 1))
    middle = a + b if one == "+" else a - b
    c = rng.randint(1, 60) if two == "+" else rng.randint(1, max(1, middle - 1)) if middle > 1 else 1
    if rng.random() < 0.3:
        opening, unit, gains, losses = rng.choice(PLACES)
        text = opening.format(a=a, **w)
        for op, number in ((one, b), (two, c)):
            text += rng.choice(PLACE_LINKS) + rng.choice(gains if op == "+" else losses).format(b=number, **w)
        unit = unit.format(**w)
        return Story(
            f"{_sentences(text)}. {rng.choice(PLACE_ENDS).format(x=unit)}", a, (a, one, b), two, c, unit
        )
    text = (
        rng.choice(OPENINGS)[tense].format(a=a, **w)
        + _event(rng, one, b, w, tense)
        + _event(rng, two, c, w, tense)
    )
    return Story(f"{_sentences(text)}. {rng.choice(ENDS).format(**w)}", a, (a, one, b), two, c, w["x"])


def groups_then(rng: random.Random) -> Story:
    """Groups of equal size, then some more or less: b * c, then + or - the rest."""
    w, tense, op = _words(rng), int(rng.random() < 0.4), rng.choice("+-")
    b, c = rng.randint(2, 12), rng.randint(2, 15)
    rest = rng.randint(2, 60) if op == "+" else rng.randint(1, b * c - 1)
    group = rng.choice(GROUPS).format(b=b, c=c, **w)
    roll = rng.random()
    if roll < 0.25:
        text = f"There {('are', 'were')[tense]} {group}. "
        text += rng.choice((f"{rest} more {w['x']} are on the floor", f"{w['n']} adds {rest} more") if op == "+" else
                           (f"{rest} {w['x']} are broken", f"{rest} of the {w['x']} are bad", f"{w['n']} takes {rest} of them", f"If {rest} {w['x']} are lost"))  # fmt: skip
        if text.rsplit(". ", 1)[1].startswith("If"):
            return Story(f"{text}, how many {w['x']} are left?", b, (b, "*", c), op, rest, w["x"])
        return Story(f"{text}. {rng.choice(PLACE_ENDS).format(x=w['x'])}", b, (b, "*", c), op, rest, w["x"])
    if roll < 0.45:
        what, unit = rng.choice(
            (
                ("reads {c} pages", "pages"),
                ("walks {c} km", "km"),
                ("writes {c} lines", "lines"),
                ("paints {c} doors", "doors"),
                ("earns {c} dollars", "dollars"),
            )
        )
        text = f"{w['n']} {what.format(c=c)} {rng.choice(('a day', 'every day', 'each day'))} for {b} days"
        text += rng.choice(
            (
                ", then {r} {u} on the weekend",
                ". On the last day {s} does {r} {u} more",
                ", and {r} {u} more on Sunday",
            )
        ).format(r=rest, u=unit, s=w["s"])
        return Story(
            f"{text}. {rng.choice((f'How many {unit} is that in total?', f'How many {unit} are that in all?'))}",
            b,
            (b, "*", c),
            "+",
            rest,
            unit,
        )
    verb = rng.choice((("has", "had"), ("buys", "bought"), ("gets", "got")))[tense]
    text = f"{w['n']} {verb} {group}" + _event(rng, op, rest, w, tense)
    return Story(f"{_sentences(text)}. {rng.choice(ENDS).format(**w)}", b, (b, "*", c), op, rest, w["x"])


def rest_after_groups(rng: random.Random) -> Story:
    """A first number, then groups are added to it or taken from it: b * c, then a + or - it."""
    w, tense, op = _words(rng), int(rng.random() < 0.4), rng.choice("+-")
    b, c = rng.randint(2, 12), rng.randint(2, 12)
    a = rng.randint(1, 90) if op == "+" else b * c + rng.randint(1, 60)
    group = rng.choice(GROUPS).format(b=b, c=c, **w)
    if rng.random() < 0.45:
        thing = rng.choice([*THINGS, "tickets", "books", "shirts"])
        if op == "-":
            text = rng.choice((
                "{n} {has} {a} dollars. {S} {buys} {b} {t} at {c} dollars each.", "{n} {has} {a} dollars and {buys} {b} {t} for {c} dollars each.",
                "Each of the {t} costs {c} dollars. {n} buys {b} and pays with {a} dollars.", "{n} goes to the shop with {a} dollars. {S} pays {c} dollars for each of {b} {t}.",
                "{n} {buys} {b} {t}. Each costs {c} dollars. {S} {has} {a} dollars before.",
            ))  # fmt: skip
            end = rng.choice(
                (
                    "How much money does {s} have left?",
                    "How many dollars are left?",
                    "How much change does {n} get?",
                    "How many dollars does {n} have left?",
                )
            )
        else:
            text = rng.choice(
                (
                    "{n} {has} {a} dollars and {sells} {b} {t} for {c} dollars each.",
                    "{n} {has} {a} dollars. Then {s} {sells} {b} {t} at {c} dollars each.",
                )
            )
            end = rng.choice(("How much money does {s} have now?", "How many dollars does {n} have now?"))
        verbs = {
            "has": ("has", "had")[tense],
            "buys": ("buys", "bought")[tense],
            "sells": ("sells", "sold")[tense],
        }
        return Story(
            (text + " " + end).format(a=a, b=b, c=c, t=thing, S=w["s"].capitalize(), **verbs, **w),
            a,
            (b, "*", c),
            op,
            None,
            "dollars",
        )
    opening = rng.choice(OPENINGS)[tense].format(a=a, **w)
    verb = rng.choice(
        (("buys", "bought"), ("gets", "got"), ("finds", "found"))
        if op == "+"
        else (("gives away", "gave away"), ("sells", "sold"), ("loses", "lost"), ("uses", "used"))
    )[tense]
    link = rng.choice(
        (
            f". {w['s'].capitalize()} {verb} ",
            f" and {verb} ",
            f". Then {w['s']} {verb} ",
            f" and then {verb} ",
        )
    )
    return Story(f"{opening}{link}{group}. {rng.choice(ENDS).format(**w)}", a, (b, "*", c), op, None, w["x"])


def shared(rng: random.Random) -> Story:
    """A count changes, then is shared; or is shared, then changes; or groups are shared."""
    w = _words(rng)
    c, each = rng.randint(2, 9), rng.randint(2, 20)
    who = rng.choice(("friends", "children", "people", "students"))
    share = rng.choice(
        (
            f"shares all of them equally among {c} {who}",
            f"shares all {w['x']} among {c} {who}",
            f"puts them equally into {c} {w['ks']}",
            f"divides them equally between {c} {who}",
        )
    )
    per = f"each {w['k']} hold" if w["ks"] in share else "each of them get"
    end = rng.choice((f"How many {w['x']} does {per}?", f"How many {w['x']} go to each?"))
    total, roll = c * each, rng.random()
    if roll < 0.3:
        divisors = [d for d in range(2, 13) if total % d == 0 and total // d > 1]
        b = rng.choice(divisors or [1])
        text = (
            f"{w['n']} has {rng.choice(GROUPS).format(b=b, c=total // b, **w)}. {w['s'].capitalize()} {share}"
        )
        return Story(f"{text}. {end}", b, (b, "*", total // b), "/", c, w["x"])
    if roll < 0.65:
        op = rng.choice("+-")
        b = rng.randint(1, max(1, total - 1)) if op == "+" else rng.randint(1, 50)
        a = total - b if op == "+" else total + b
        text = (
            rng.choice(OPENINGS)[0].format(a=a, **w) + _event(rng, op, b, w, 0) + f". Then {w['s']} {share}"
        )
        return Story(f"{_sentences(text)}. {end}", a, (a, op, b), "/", c, w["x"])
    op = rng.choice("+-")
    last = rng.randint(1, 30) if op == "+" else rng.randint(1, each - 1)
    put = f"puts them equally into {c} {w['ks']}"
    change = f"adds {last} to each" if op == "+" else f"takes {last} out of each"
    text = f"{w['n']} has {total} {w['x']}. {w['s'].capitalize()} {put} and then {change}"
    return Story(f"{text}. How many {w['x']} are in each {w['k']}?", total, (total, "/", c), op, last, w["x"])


def per_item(rng: random.Random) -> Story:
    """A count changes or is split in two kinds, then something for each."""
    w = _words(rng)
    a, b, c = rng.randint(4, 30), rng.randint(2, 12), rng.randint(2, 9)
    roll = rng.random()
    if roll < 0.35:
        b = rng.randint(1, a - 1)
        left, right = rng.choice(
            (("boys", "girl"), ("girls", "boy"), ("old", "new student"), ("absent", "other student"))
        )
        text = f"There are {a} students in a class. {b} are {left}. Each {right} gets {c} {w['x']}"
        return Story(
            f"{text}. {rng.choice(('How many {x} are needed?', 'How many {x} is that?')).format(x=w['x'])}",
            a,
            (a, "-", b),
            "*",
            c,
            w["x"],
        )
    if roll < 0.7:
        text = f"{w['n']} has {a} red and {b} blue {rng.choice(('bags', 'boxes'))}. Each holds {c} {w['x']}"
        return Story(f"{text}. How many {w['x']} does {w['n']} have?", a, (a, "+", b), "*", c, w["x"])
    t, u = rng.sample(THINGS, 2)
    text = f"One of the {t} costs {a} dollars and one of the {u} costs {b} dollars. {w['n']} buys {c} of each"
    return Story(f"{text}. How many dollars does {w['s']} pay?", a, (a, "+", b), "*", c, "dollars")


def left_of_total(rng: random.Random) -> Story:
    """Two parts of a whole: their sum, then the whole minus it (or the sum of three)."""
    w = _words(rng)
    a, b = rng.randint(3, 80), rng.randint(3, 80)
    whole = a + b + rng.randint(1, 90)
    what, unit = rng.choice((("A train travels {a} km in the first hour and {b} km in the second", "km"), ("{n} walks {a} km on Monday and {b} km on Tuesday", "km"),
                             ("{n} reads {a} pages on Monday and {b} pages on Tuesday", "pages"), ("{n} spends {a} dollars on food and {b} dollars on books", "dollars"),
                             ("{n} gives {a} {x} to {m} and {b} {x} to a friend", "{x}")))  # fmt: skip
    whole_text = {"km": "The whole way is {w} km. How many km are left?", "pages": "The book has {w} pages. How many pages are left?",
                  "dollars": "{S} had {w} dollars. How many dollars are left?", "{x}": "{S} had {w} {x}. How many {x} are left?"}[unit]  # fmt: skip
    text = f"{what}. {whole_text}".format(a=a, b=b, w=whole, S=w["s"].capitalize(), **w)
    return Story(text, whole, (a, "+", b), "-", None, unit.format(**w))


KINDS = (
    (running, 5),
    (groups_then, 3),
    (rest_after_groups, 3),
    (shared, 3),
    (per_item, 2),
    (left_of_total, 1),
)


def story(rng: random.Random) -> Story:
    """One story of a random kind."""
    return rng.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])[0](rng)
