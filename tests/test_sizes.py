"""Symbolic sizes: what they are in this call, what they say of others, and what makes a guard."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import pytest

from cupy_mla.sizes import Size, Trace, is_node, least, looked_up, most, number, term


@pytest.fixture
def trace() -> Trace:
    return Trace()


@pytest.fixture
def n(trace) -> Size:
    return trace.read("n", 12)


N, M = ("read", "n"), ("read", "m")


def guards(trace: Trace) -> list:
    return list(trace.guards)


# --- arithmetic -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "value", "node"),
    [
        (lambda n, m: n + m, 17, ("+", N, M)),
        (lambda n, m: n + 3, 15, ("+", N, 3)),
        (lambda n, m: 3 + n, 15, ("+", N, 3)),
        (lambda n, m: n - 1 + 3, 14, ("+", N, 2)),
        (lambda n, m: n + 1 - 3, 10, ("-", N, 2)),
        (lambda n, m: n - 1 + 1, 12, N),
        (lambda n, m: (n + 3) + (m - 5), 15, ("-", ("+", N, M), 2)),
        (lambda n, m: (n + 3) - (m + 2), 8, ("+", ("-", N, M), 1)),
        (lambda n, m: 9 - (n + 2), -5, ("-", 7, N)),
        (lambda n, m: n - m, 7, ("-", N, M)),
        (lambda n, m: 3 - n, -9, ("-", 3, N)),
        (lambda n, m: n * m, 60, ("*", N, M)),
        (lambda n, m: 2 * n, 24, ("*", N, 2)),
        (lambda n, m: n // m, 2, ("//", N, M)),
        (lambda n, m: 100 // n, 8, ("//", 100, N)),
        (lambda n, m: n % m, 2, ("%", N, M)),
        (lambda n, m: -n, -12, ("neg", N)),
        (lambda n, m: abs(m - n), 7, ("abs", ("-", M, N))),
        (lambda n, m: n.bit_length(), 4, ("bits", N)),
        (lambda n, m: -(-n // 8), 2, ("neg", ("//", ("neg", N), 8))),
        (lambda n, m: -(-(1024 * n) // 256) * 256, 12288, ("*", N, 1024)),
        (lambda n, m: -(-(6 * n) // 4), 18, ("neg", ("//", ("neg", ("*", N, 6)), 4))),
        (lambda n, m: (2 * n) * (3 * m), 360, ("*", ("*", N, M), 6)),
        (lambda n, m: -n * (m * 4), -240, ("neg", ("*", ("*", N, M), 4))),
        (lambda n, m: -n * -m, 60, ("*", N, M)),
        (lambda n, m: least(n, m), 5, ("min", N, M)),
        (lambda n, m: most(n, 20), 20, ("max", N, 20)),
    ],
)
def test_arithmetic_makes_sizes(trace, n, compute, value, node):
    result = compute(n, trace.read("m", 5))
    assert isinstance(result, Size)
    assert (number(result), term(result)) == (value, node)
    assert guards(trace) == []


def test_what_changes_nothing_is_left_out(trace, n):
    for same in (n + 0, 0 + n, n - 0, n * 1, 1 * n, n // 1):
        assert same is n
    assert guards(trace) == []


def test_multiples_leave_no_rest(trace, n):
    """Known of every call, whatever n is."""
    assert (8 * n) % 4 == 0
    assert type((8 * n) % 4) is int
    assert isinstance((8 * n) % 16, Size)
    assert isinstance(n % 4, Size)


@pytest.mark.parametrize("function", [operator.add, operator.mul, operator.sub, operator.floordiv, operator.mod])
def test_other_things_than_integers_are_refused(n, function):
    with pytest.raises(TypeError, match="unsupported operand"):
        function(n, 1.5)
    with pytest.raises(TypeError, match="unsupported operand"):
        function(n, None)


def test_numbers_stay_numbers():
    assert (least(3, 5), most(3, 5)) == (3, 5)
    assert (number(3), number("x"), term(3), term(None)) == (3, "x", 3, None)


def test_what_is_a_term():
    assert is_node(N)
    assert is_node(("+", N, 1))
    assert is_node(("get", ("call", max, N), 0))
    assert not is_node(3)
    assert not is_node(())
    assert not is_node(("a", "tuple"))


# --- guards ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compare", "holds", "guard"),
    [
        (lambda n: n == 12, True, ("==", N, 12)),
        (lambda n: n == 13, False, ("not", ("==", N, 13))),
        (lambda n: n != 13, True, ("not", ("==", N, 13))),
        (lambda n: n < 13, True, ("<", N, 13)),
        (lambda n: n <= 11, False, ("not", ("<=", N, 11))),
        (lambda n: n > 11, True, ("<", 11, N)),
        (lambda n: n >= 13, False, ("not", ("<=", 13, N))),
        (lambda n: 12 in (n,), True, ("==", N, 12)),
        (lambda n: bool(n), True, ("not", ("==", N, 0))),
        (lambda n: bool(n - 12), False, ("==", ("-", N, 12), 0)),
        (lambda n: n == 12.0, True, ("==", N, 12.0)),
    ],
)
def test_comparisons_leave_guards(trace, n, compare, holds, guard):
    assert compare(n) is holds
    assert guards(trace) == [guard]


@pytest.mark.parametrize(
    "look",
    [int, hash, float, operator.index, range(20).__getitem__, lambda n: [0] * n, {12: "x"}.__getitem__],
    ids=["int", "hash", "float", "index", "in a range", "times a list", "as a key"],
)  # fmt: skip
def test_where_python_needs_the_number_it_is_a_guard(trace, n, look):
    look(n)
    assert set(guards(trace)) == {("==", N, 12)}


def test_what_is_no_number_is_not_equal(trace, n):
    assert n != "12"
    assert n != (12,)
    assert n is not None
    assert n != None  # noqa: E711
    assert guards(trace) == []


def test_showing_a_size_leaves_no_guard(trace, n):
    """Messages end a call."""
    assert f"{n} {n!r} {n:>4}" == "12 12   12"
    assert str([n]) == "[12]"
    assert guards(trace) == []


def test_a_guard_is_noted_once(trace, n):
    assert n > 3
    assert n > 3
    assert len(guards(trace)) == 1


def test_a_multiple_that_is_implied_is_no_guard(trace):
    p = trace.read("p", 256)
    assert p % 16 == 0
    assert p % 4 == 0
    assert guards(trace) == [("==", ("%", ("read", "p"), 16), 0)]
    assert p % 32 == 0
    assert len(guards(trace)) == 2


def test_a_multiple_that_is_none_is_a_guard(trace):
    p = trace.read("p", 24)
    assert p % 8 == 0
    assert p % 16 != 0
    assert guards(trace)[1:] == [("not", ("==", ("%", ("read", "p"), 16), 0))]


# --- functions of sizes ---------------------------------------------------------------------------------------


class Found(NamedTuple):
    name: str
    count: int
    share: float
    sure: bool


def find(a: int, b: int) -> Found:
    assert type(a) is type(b) is int
    return Found("many" if a > 10 else "few", a + b, a / b, True)


def test_a_function_is_called_again_in_every_call(trace, n):
    """Numbers of its result are sizes, all else guards."""
    found = looked_up(find, n, 4)
    assert type(found) is Found
    node = ("call", find, N, 4)
    assert (found.name, found.sure) == ("many", True)
    assert (number(found.count), term(found.count)) == (16, ("get", node, 1))
    assert (number(found.share), term(found.share)) == (3.0, ("get", node, 2))
    ((sign, (call, entries_of, of), values),) = guards(trace)
    assert (sign, call, of, values) == ("==", "call", node, ("many", True))
    assert entries_of(("few", 1, 2.0, False)) == ("few", False)
    other = Trace()
    looked_up(find, other.read("n", 12), 4)
    assert guards(other) == guards(trace), "not the same in two traces"


def test_a_dictionary_is_looked_up_with_what_a_function_says_at_the_time(trace, n):
    class Made(dict[Any, Any]):
        def __missing__(self, key: Any) -> Any:
            assert all(type(of) in (int, str) for of in key)
            return "x", len(key)

    made, asked = Made(), iter("ab")
    result = looked_up(made, n, lambda: next(asked), 4)
    assert (result[0], number(result[1])) == ("x", 3)
    node = ("call", made.__getitem__, ("tuple", N, ("read", "now"), 4))
    assert term(result[1]) == ("get", node, 1)
    assert trace.depends_on() == "b"
    with pytest.raises(AssertionError):
        looked_up(made, n, lambda: "another")


def test_a_function_may_return_a_plain_tuple(trace, n):
    result = looked_up(lambda a: (a, None), n)
    assert type(result) is tuple
    assert number(result[0]) == 12
    assert result[1] is None


def test_a_function_of_numbers_is_just_called():
    assert looked_up(find, 11, 2) == find(11, 2)
    assert type(looked_up(find, 11, 2).count) is int


# --- what guards say ------------------------------------------------------------------------------------------


def test_what_guards_say_is_no_guard_again(trace, n):
    assert n > 3
    assert n <= 20
    for known in (n > 2, n >= 4, n != 3, n < 21, n != 100):
        assert known
    assert guards(trace) == [("<", 3, N), ("<=", N, 20)]
    assert n != 4  # now 5 is the least
    assert n >= 5
    assert len(guards(trace)) == 3


def test_a_size_of_one_number_is_that_number(trace, n):
    twice = 2 * n
    assert n == 12
    assert (term(n), term(3 * n + 1), type(3 * n)) == (12, 37, int)
    assert term(twice) == 24  # was made before
    m = trace.read("m", 5)
    assert m >= n - 7
    assert m <= 5
    assert (term(m), term(m * n), is_node(term(m + trace.read("k", 1)))) == (5, 60, True)


def test_a_term_of_known_sizes_is_simpler(trace, n):
    m = trace.read("m", 5)
    of = 4 * (n * m) - n
    assert m == 5
    assert term(of) == ("-", ("*", N, 20), N)
    assert term((m - 4) * n) == N
    assert n == 12
    assert term(of) == 228


def test_a_size_equals_itself(trace, n):
    assert n == n + 0
    assert n <= 1 * n
    assert not n < n + 1 - 1
    assert guards(trace) == []


def test_bounds_decide_which_is_less(trace, n):
    of = most(1, n), least(n, 1), least(1, n)
    assert [type(term(o)) is int for o in of] == [False] * 3
    assert n >= 2
    assert [term(o) for o in of] == [N, 1, 1]
    assert [term(o) for o in (most(n, 1), most(n, 2), most(3, n))] == [N, N, ("max", 3, N)]


def test_products_of_lengths_are_not_negative(trace, n):
    m, k = trace.read("m", 5, least=2), trace.read("k", 7, least=3)
    assert m * k >= 6
    assert guards(trace) == []


def test_lengths_are_known_not_to_be_negative(trace):
    length = trace.read("h", 3, least=0)
    assert length >= 0
    assert guards(trace) == []
    assert length  # not 0
    assert length >= 1
    assert guards(trace) == [("not", ("==", ("read", "h"), 0))]


def test_quotients_of_multiples_are_compared_whole(trace):
    """Strides in bytes that must be whole items; those that are known leave no guard that they are."""
    first, second, third = (trace.read(name, 8, multiple_of=4) for name in "abc")
    assert first // 4 == 2
    assert (term(first), term(first // 4)) == (8, 2)
    assert not second // 4 < 2
    assert term((second // 4) * 4) == ("read", "b")
    assert term((third // 4 + 1) * 8) == ("*", ("+", ("//", ("read", "c"), 4), 1), 8)
    trace.end()
    known, least, multiples = guards(trace)
    assert known == ("==", ("read", "a"), 8)
    assert least == ("not", ("<", ("read", "b"), 8))
    assert multiples == ("==", ("%", ("|", ("read", "b"), ("read", "c")), 4), 0)


def test_quotients_of_what_may_be_no_multiple_are_no_whole_ones(trace, n):
    assert term((n // 4) * 4) == ("*", ("//", N, 4), 4)
    assert n // 4 == 3
    assert (term(n // 4), term(n)) == (3, N)
    assert guards(trace) == [("==", ("//", N, 4), 3)]


def test_bounds_of_a_quotient_are_its_own_and_those_of_what_is_divided(trace, n):
    assert n < 15
    assert n // 4 < 4
    assert n // 4 > 2
    assert term(n // 4) == 3
    assert guards(trace) == [("<", N, 15), ("<", 2, ("//", N, 4))]


SIGNS = {
    "==": operator.eq, "<": operator.lt, "<=": operator.le, "+": operator.add, "-": operator.sub, "*": operator.mul,
    "//": operator.floordiv, "%": operator.mod, "|": operator.or_, "neg": operator.neg, "min": min, "max": max,
}  # fmt: skip
TERMS = (
    lambda a, b, k: a // k,
    lambda a, b, k: -(-(4 * a) // k) * k,
    lambda a, b, k: (a * b) * k - a,
    lambda a, b, k: (a * k) * (b * 2) // 2,
    lambda a, b, k: most(a, k) + b,
    lambda a, b, k: least(b, a * k),
)
COMPARE = (operator.eq, operator.lt, operator.le, operator.gt, operator.ge, operator.ne)


def test_no_guard_is_missing(rng):
    """Numbers that meet the guards give the same answers, those that left no guard included."""
    for _ in range(300):
        trace = Trace()
        steps = [2 ** int(k) for k in rng.integers(0, 3, 2)]
        values = [int(k) // step * step for k, step in zip(rng.integers(0, 8, 2), steps, strict=True)]
        sizes = [trace.read(name, n, multiple_of=of) for name, n, of in zip("nm", values, steps, strict=True)]
        asked = []
        for _ in range(6):
            compare, (i, j), number = COMPARE[rng.integers(6)], rng.permutation(2), int(rng.integers(-1, 9))
            divisor, make = steps[i] * int(rng.choice([-1, 1, 2])), TERMS[rng.integers(len(TERMS))]
            of = lambda two, i=i, j=j, number=number, divisor=divisor, make=make: (  # noqa: E731
                make(two[i], two[j], divisor), two[j] if number < 2 else number,
            )  # fmt: skip
            asked.append((compare, of, compare(*of(sizes))))
        trace.end()
        for n in range(-2, 10):
            for m in range(-2, 10):
                if all(meets(guard, {"n": n, "m": m}) for guard in trace.guards):
                    assert all(compare(*of((n, m))) == answer for compare, of, answer in asked), (trace.guards, n, m)
                    for _, of, _ in asked:
                        for size, number in zip(of(sizes), of((n, m)), strict=True):
                            assert value_of(term(size), {"n": n, "m": m}) == number, (trace.guards, n, m, term(size))


def meets(guard: tuple, values: dict[str, int]) -> bool:
    if guard[0] == "not":
        return not meets(guard[1], values)
    return SIGNS[guard[0]](*(value_of(of, values) for of in guard[1:]))


def value_of(of: object, values: dict[str, int]) -> int:
    if not isinstance(of, tuple):
        return of
    return values[of[1]] if of[0] == "read" else SIGNS[of[0]](*(value_of(part, values) for part in of[1:]))
