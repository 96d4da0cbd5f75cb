"""The float64 oracle, written from the specification alone: nothing here knows cupy_mla.

Rows are parsed from bytes one token at a time, attention is the textbook formula in float64, and `assert_close` is
the specification's table of how close a result must be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

BF16, FLOAT8_E5M2 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e5m2)
D_V = 512


# --- numbers --------------------------------------------------------------------------------------------------


def _e4m3_value(code: int) -> float:
    """float8_e4m3fn: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, one NaN a sign."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


E4M3 = np.array([_e4m3_value(code) for code in range(256)])


def _e5m2_value(code: int) -> float:
    """float8_e5m2: 1 sign, 5 exponent (bias 15), 2 mantissa bits; infinities and NaN as in float16."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 2 & 31, code & 3
    if exponent == 31:
        return math.nan if mantissa else sign * math.inf
    return sign * (math.ldexp(mantissa, -16) if exponent == 0 else math.ldexp(4 + mantissa, exponent - 17))


E5M2 = np.array([_e5m2_value(code) for code in range(256)])


def fp8(a: np.ndarray) -> np.ndarray:
    """The values of an array of e5m2, or else of e4m3, as float64."""
    return (E5M2 if a.dtype == FLOAT8_E5M2 else E4M3)[a.view(np.uint8)]


def e4m3_code(x: np.ndarray) -> np.ndarray:
    """Codes of x rounded to the nearest value, ties to the even code, saturated at 448; NaN becomes 0x7f."""
    magnitude = np.minimum(np.abs(np.asarray(x, np.float64)), 448.0)
    above = np.searchsorted(E4M3[:127], magnitude)  # the first code whose value is not below; NaN lands past the end
    above = np.minimum(above, 126)
    below = np.maximum(above - 1, 0)
    up, down = E4M3[above] - magnitude, magnitude - E4M3[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = np.where(np.isnan(magnitude), 0x7F, code | np.where(np.signbit(x), 0x80, 0))
    return code.astype(np.uint8)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e2m1_code(x: np.ndarray) -> np.ndarray:
    """Codes of x by the intervals that round to them, saturated at 6; -0 stays."""
    m = np.abs(x)
    up_to = sum(m > bound for bound in (0.25, 1.25, 2.5, 5)), sum(m >= bound for bound in (0.75, 1.75, 3.5))
    return (up_to[0] + up_to[1] + 8 * np.signbit(x)).astype(np.uint8)


def bf16_values(raw: bytes) -> np.ndarray:
    """bfloat16 is the upper half of a float32."""
    return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)


# --- layouts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A cache layout as the specification's tables give it."""

    name: str
    d_qk: int
    nope: int  # quantized values; 0 where nothing is
    tile: int
    token_bytes: int
    scale: float | None = None  # of all rows, where a call brings it
    dtype: np.dtype = BF16  # of values that are not quantized
    named: bool = False  # whether a call must name it, for rows of its size may be another's

    @property
    def quantized(self) -> bool:
        return self.nope > 0

    @property
    def last_axis(self) -> int:
        return self.token_bytes if self.quantized else self.d_qk

    @property
    def layout(self) -> str | None:
        """What a call says of it."""
        return self.name if self.named else None


BF16_576 = Format("bf16_576", 576, 0, 0, 1152)
BF16_512 = Format("bf16_512", 512, 0, 0, 1024)
V32 = Format("v32_fp8", 576, 512, 128, 656)
V4 = Format("v4_fp8", 512, 448, 64, 584)
PLAIN_576 = Format("plain_fp8_576", 576, 576, 576, 576, scale=1.0)
PLAIN_512 = Format("plain_fp8_512", 512, 512, 512, 512, scale=1.0)
FP16_576 = Format("fp16_576", 576, 0, 0, 1152, dtype=np.dtype(np.float16))
FP16_512 = Format("fp16_512", 512, 0, 0, 1024, dtype=np.dtype(np.float16))
V32_NOPE = Format("v32_nope_fp8", 512, 512, 128, 528, named=True)
V41 = Format("v41_fp8", 512, 512, 32, 528, named=True)
V41_SPLIT = Format("v41_fp8_split", 512, 512, 32, 528, named=True)
V32_NVFP4 = Format("v32_nvfp4", 576, 512, 16, 352)
V4_NVFP4 = Format("v4_nvfp4", 512, 448, 16, 384)
V41_FP4 = Format("v41_fp4", 512, 512, 16, 288)
V41_FP4_SPLIT = Format("v41_fp4_split", 512, 512, 16, 288)
V41_FP4S = (V41_FP4, V41_FP4_SPLIT)
FP4 = (V32_NVFP4, V4_NVFP4, *V41_FP4S)
FORMATS = (BF16_576, BF16_512, V32, V4, PLAIN_576, PLAIN_512)
DENSE_FORMATS = (*FORMATS, FP16_576, FP16_512)


def unpack_row(fmt: Format, block: bytes, block_size: int, t: int) -> np.ndarray:
    """Token `t` of a block of `block_size` tokens, whose bytes are `block`, as float64 [d_qk]."""
    if fmt in FP4:
        return _unpack_fp4(fmt, block, block_size, t)
    if not fmt.quantized:
        row = block[fmt.token_bytes * t : fmt.token_bytes * (t + 1)]
        return bf16_values(row) if fmt.dtype == BF16 else np.frombuffer(row, fmt.dtype).astype(np.float64)
    if fmt.scale is not None:
        codes, rope = block[fmt.token_bytes * t : fmt.token_bytes * (t + 1)], b""
        scales = np.array([np.float32(fmt.scale)], np.float64)
    elif fmt in (V32, V32_NOPE):
        token = block[fmt.token_bytes * t : fmt.token_bytes * (t + 1)]
        codes, rope = token[:512], token[528:]
        scales = np.frombuffer(token[512:528], "<f4").astype(np.float64)
    elif fmt is V41:
        token = block[528 * t : 528 * (t + 1)]
        codes, rope = token[:512], b""
        scales = np.ldexp(1.0, np.frombuffer(token[512:], np.uint8).astype(int) - 127)
    elif fmt is V41_SPLIT:
        start = 512 * block_size + 16 * t
        codes, rope = block[512 * t : 512 * (t + 1)], b""
        scales = np.ldexp(1.0, np.frombuffer(block[start : start + 16], np.uint8).astype(int) - 127)
    else:
        token = block[576 * t : 576 * (t + 1)]
        codes, rope = token[:448], token[448:576]
        start = 576 * block_size + 8 * t
        scales = np.ldexp(1.0, np.frombuffer(block[start : start + 7], np.uint8).astype(int) - 127)
    row = np.empty(fmt.d_qk)
    with np.errstate(invalid="ignore"):  # 0 * inf
        row[: fmt.nope] = E4M3[np.frombuffer(codes, np.uint8)] * np.repeat(scales, fmt.tile)
    row[: fmt.nope][np.repeat(scales, fmt.tile) == 0] = 0  # whatever is stored under a scale of 0
    row[fmt.nope :] = bf16_values(rope)
    return row


def _unpack_fp4(fmt: Format, block: bytes, block_size: int, t: int) -> np.ndarray:
    if fmt is V32_NVFP4:
        token = block[352 * t : 352 * (t + 1)]
        codes, rope = token[:256], E4M3[np.frombuffer(token[256:320], np.uint8)]
        scales = [E4M3[token[320 + 8 * (tile & 3) + (tile >> 2)]] for tile in range(32)]
    elif fmt is V41_FP4:
        token = block[288 * t : 288 * (t + 1)]
        codes, scales, rope = token[:256], [E4M3[code] for code in token[256:]], np.zeros(0)
    elif fmt is V41_FP4_SPLIT:
        start = 256 * block_size + 32 * t
        codes, rope = block[256 * t : 256 * (t + 1)], np.zeros(0)
        scales = [E4M3[code] for code in block[start : start + 32]]
    else:
        token, start = block[352 * t : 352 * (t + 1)], 352 * block_size + 32 * t
        codes, rope = token[:224], bf16_values(token[224:])
        scales = [E4M3[code] for code in block[start : start + 28]]
    two = np.frombuffer(codes, np.uint8)
    values = E2M1[np.stack([two & 15, two >> 4], axis=1)].reshape(-1, 16)
    return np.concatenate([(values * np.array(scales)[:, None] + 0.0).reshape(-1), rope])  # no -0


def _pack_fp4(fmt: Format, row: np.ndarray, scale_format: str) -> tuple[bytes, bytes]:
    """scale_format: "nearest" of V32_NVFP4; else its scales are rounded up."""
    tiles = row[: fmt.nope].astype(np.float32).reshape(-1, 16)
    amax = np.abs(tiles).max(1)
    wanted = amax / np.float32(6)
    if fmt is not V4_NVFP4:
        wanted = np.maximum(wanted, np.float32(2**-9))
    scales = e4m3_code(wanted)
    if fmt is V32_NVFP4 and scale_format != "nearest":
        scales = scales + ((E4M3[scales] < wanted) & (scales < 0x7E))
    numbers = E4M3[scales].astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(numbers == 0, np.float32(0), np.float32(1) / numbers)
        codes = e2m1_code(tiles / numbers[:, None] if fmt in V41_FP4S else tiles * inverse[:, None])
    lost = ~np.isfinite(amax)
    codes[lost], scales = 0, np.where(lost, 0x7F, scales).astype(np.uint8)
    two = codes.reshape(-1, 2)
    data = (two[:, 0] | two[:, 1] << 4).tobytes()
    if fmt is V4_NVFP4:
        return data + row[448:].tobytes(), scales.tobytes() + bytes(4)
    if fmt in V41_FP4S:
        return (data + scales.tobytes(), b"") if fmt is V41_FP4 else (data, scales.tobytes())
    places = [8 * (tile & 3) + (tile >> 2) for tile in range(32)]
    return data + e4m3_code(row[512:].astype(np.float32)).tobytes() + bytes(scales[np.argsort(places)]), b""


def pack_row(fmt: Format, row: np.ndarray, scale_format: str = "fp32") -> tuple[bytes, bytes]:
    """A bf16 row [d_qk] as (data bytes, scale bytes) of its token; V32's scales lie inside the data."""
    if not fmt.quantized:
        return row.astype(fmt.dtype).tobytes(), b""
    if fmt in FP4:
        return _pack_fp4(fmt, row, scale_format)
    if fmt.scale is not None:
        return e4m3_code(row.astype(np.float32) / np.float32(fmt.scale)).tobytes(), b""
    tiles, rope = row[: fmt.nope].astype(np.float32).reshape(-1, fmt.tile), row[fmt.nope :].tobytes()
    largest = np.where(np.isnan(tiles), 0, np.abs(tiles)).max(1)  # infinite where one is
    scales = np.array([_scale(fmt, amax, scale_format) for amax in largest], "<f4")
    with np.errstate(invalid="ignore", divide="ignore"):  # infinity under an infinite scale is NaN
        codes = np.where(scales[:, None] == 0, 0, e4m3_code(tiles / scales[:, None])).astype(np.uint8).tobytes()
    if fmt in (V32, V32_NOPE):
        return codes + scales.tobytes() + rope, b""
    exponents = bytes(255 if math.isinf(s) else min(max(round(math.log2(s)) + 127, 0), 255) for s in scales)
    if fmt is V41:
        return codes + exponents, b""
    if fmt is V41_SPLIT:
        return codes, exponents
    return codes + rope, exponents + b"\0"


def _scale(fmt: Format, amax: np.float32, scale_format: str) -> np.float32:
    def power_of_two_from(x: np.float32) -> np.float32:
        if math.isinf(x):
            return x
        exponent = math.ceil(math.log2(x))  # in float64: exact at powers of two, and no float32 is closer to one
        return np.float32(2.0**exponent)

    if fmt in (V4, V41, V41_SPLIT) and scale_format != "quotient":
        return power_of_two_from(max(amax, np.float32(1e-4)) / np.float32(448))
    scale = amax / np.float32(448)
    if scale_format in ("ue8m0", "quotient"):  # what is floored at 1e-4
        return power_of_two_from(max(scale, np.float32(1e-4)))
    if scale_format == "no floor":  # but for numbers that GPUs take for 0
        return scale if scale >= np.finfo(np.float32).tiny else np.float32(0)
    return max(scale, np.finfo(np.float32).tiny)


def write_token(
    fmt: Format, block: np.ndarray, block_size: int, t: int, row: np.ndarray, scale_format: str = "fp32"
) -> None:
    """Write a bf16 row as token `t` into a block's bytes (uint8, at least `token_bytes * block_size` of them)."""
    data, scales = pack_row(fmt, row, scale_format)
    block[len(data) * t : len(data) * (t + 1)] = np.frombuffer(data, np.uint8)
    if scales:
        start = len(data) * block_size + len(scales) * t
        block[start : start + len(scales)] = np.frombuffer(scales, np.uint8)


def named_rows(fmt: Format, cache: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """The rows of a cache [num_blocks, block_size, last axis] that valid entries name, in order, float64 [n, d_qk]."""
    num_blocks, block_size, _ = cache.shape
    blocks: dict[int, bytes] = {}
    rows: dict[int, np.ndarray] = {}
    named = [int(e) for e in entries if 0 <= e < num_blocks * block_size]
    for slot in named:
        if slot not in rows:
            b, t = divmod(slot, block_size)
            if b not in blocks:
                blocks[b] = cache[b].tobytes()
            rows[slot] = unpack_row(fmt, blocks[b], block_size, t)
    return np.array([rows[slot] for slot in named]).reshape(len(named), fmt.d_qk)


# --- attention ------------------------------------------------------------------------------------------------


def attend(
    q: np.ndarray, rows: np.ndarray, scale: float, sink: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One query [h, d_qk] over its rows [n, d_qk]: out [h, 512], max_logits [h], lse [h], all float64."""
    heads = len(q)
    if len(rows) == 0:
        return np.zeros((heads, D_V)), np.full(heads, -np.inf), np.full(heads, np.inf)
    logits = scale * (q.astype(np.float64) @ rows.T)
    top = logits.max(axis=1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    out = np.exp(logits - lse[:, None]) @ rows[:, :D_V]
    if sink is not None:
        with np.errstate(over="ignore"):
            out /= (1 + np.exp(sink.astype(np.float64) - lse))[:, None]
    return out, top, lse


def prefill(
    q: np.ndarray,
    kv: np.ndarray,
    indices: np.ndarray,
    scale: float,
    sink: np.ndarray | None = None,
    length: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [s_q, h, d], kv [s_kv, 1, d], indices [s_q, 1, topk]: out [s_q, h, 512], max_logits and lse [s_q, h]."""
    s_q, heads, _ = q.shape
    out, top, lse = np.empty((s_q, heads, D_V)), np.empty((s_q, heads)), np.empty((s_q, heads))
    for i in range(s_q):
        entries = indices[i, 0] if length is None else indices[i, 0, : max(int(length[i]), 0)]
        rows = kv[[e for e in entries if 0 <= e < len(kv)], 0].astype(np.float64)
        out[i], top[i], lse[i] = attend(q[i], rows, scale, sink)
    return out, top, lse


def decode(
    fmt: Format | tuple[Format, ...],
    q: np.ndarray,
    lists: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]],
    scale: float,
    sink: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """q [b, s_q, h, d] over (cache, indices [b, s_q, topk], lengths [b] or None) lists: out, lse [b, h, s_q].

    The caches are of one format, or of one each.
    """
    formats = fmt if isinstance(fmt, tuple) else (fmt,) * len(lists)
    b, s_q, heads, _ = q.shape
    out, lse = np.empty((b, s_q, heads, D_V)), np.empty((b, heads, s_q))
    for i in range(b):
        for j in range(s_q):
            rows = [
                named_rows(of, cache, idx[i, j] if length is None else idx[i, j, : max(int(length[i]), 0)])
                for of, (cache, idx, length) in zip(formats, lists, strict=True)
            ]
            out[i, j], _, lse[i, :, j] = attend(q[i, j], np.concatenate(rows), scale, sink)
    return out, lse


# --- how close it must be -------------------------------------------------------------------------------------

# result: (absolute bound, relative bound, bound on the cosine difference)
TOLERANCES = {
    "prefill out": (8e-4, 3.01 / 128, 7e-6),
    "prefill max_logits": (1e-6, 2.01 / 65536, None),
    "prefill lse": (1e-6, 2.01 / 65536, None),
    "decode out": (1e-3, 2.01 / 128, 5e-6),
    "decode lse": (1e-6, 8.01 / 65536, None),
}


def cosine_difference(a: np.ndarray, b: np.ndarray) -> float:
    """`1 - 2<a,b> / (<a,a> + <b,b>)` over all elements, 0 where both are zero."""
    a, b = np.asarray(a, np.float64).ravel(), np.asarray(b, np.float64).ravel()
    norms = a @ a + b @ b
    return 0.0 if norms == 0 else float(1 - 2 * (a @ b) / norms)


def assert_close(got: np.ndarray, want: np.ndarray, result: str) -> None:
    """Every element within the absolute or the relative bound, infinities at the same places, cosine difference."""
    absolute, relative, cosine = TOLERANCES[result]
    assert got.shape == want.shape, f"{result}: shape {got.shape}, expected {want.shape}"
    got = np.asarray(got, np.float64)
    assert not np.isnan(want).any(), f"{result}: the oracle itself has NaN"
    nan = np.isnan(got)
    assert not nan.any(), f"{result}: {nan.sum()} NaN of {nan.size}, first at {_first(nan)}"
    for infinity in (np.inf, -np.inf):
        apart = (got == infinity) != (want == infinity)
        assert not apart.any(), f"{result}: {infinity} at other places, first at {_first(apart)}"
    finite = np.isfinite(want)
    got, want = np.where(finite, got, 0.0), np.where(finite, want, 0.0)
    error = np.abs(got - want)
    bad = (error >= absolute) & (error >= relative * np.abs(want))
    if bad.any():
        worst = np.unravel_index(np.argmax(np.where(bad, error, -1)), error.shape)
        raise AssertionError(
            f"{result}: {bad.sum()} of {bad.size} elements out of bounds; worst at {tuple(map(int, worst))}: "
            f"got {got[worst]!r}, expected {want[worst]!r}"
        )
    if cosine is not None:
        difference = cosine_difference(got, want)
        assert difference < cosine, f"{result}: cosine difference {difference:.3g}, allowed {cosine:.3g}"


def assert_close_to_sum(
    got: np.ndarray, want: np.ndarray, squares: np.ndarray, cosine: float, result: str, rounding: float = 0.0
) -> None:
    """Every element within `2**-7` of its value and 3 % of the root of the sum of its summands' squares; and the cosine
    difference, where the sums do not cancel to less than 1e-5 of their summands.

    Args:
        rounding: the norm of the error that rounded summands may leave, however much of them cancels. The cosine
            difference of an error so small may be larger.
    """
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape, f"{result}: shape {got.shape}, expected {want.shape}"
    assert np.isfinite(got).all(), f"{result}: {(~np.isfinite(got)).sum()} of {got.size} not finite"
    error, allowed = np.abs(got - want), 2.0**-7 * np.abs(want) + 0.03 * np.sqrt(squares)
    bad = error > allowed
    assert not bad.any(), f"{result}: {bad.sum()} of {bad.size} elements out of bounds, first at {_first(bad)}"
    least = 1e-5 * np.sqrt(squares.sum())  # of a list of one row all cancels, and what is left has no direction
    if min(np.linalg.norm(error), np.linalg.norm(want)) > least and np.linalg.norm(error) > rounding:
        difference = cosine_difference(got, want)
        assert difference < cosine, f"{result}: cosine difference {difference:.3g}, allowed {cosine:.3g}"


def _first(where: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(where)[0])
