"""Singular values and vectors of small matrices in Triton: one-sided Jacobi rotations in registers.

A lane holds two columns, X and Y, of W = QV and of V; rows are a tuple of chunks `(rows, lanes)`. Once the columns
of W are orthogonal, W = U diag(λ). Columns carry tokens, numbered from zero, and meet each other once a sweep:

- Round A: lane k holds tokens (t+k, t-k) modulo N-1, lane 0 holds (t, N-1). Afterwards X moves from lane k+1 to lane k.
- Round B: lane k holds (t+1+k, t-k), the last lane N-1 as X. Afterwards Y moves from lane k-1 to lane k.

The longer column of a pair goes to the lower token. Other orders, or none, take twice the sweeps or never end.
"""

# mypy: ignore-errors
# The functions are read by Triton's compiler: no value in them has a type of Python.

from __future__ import annotations

import triton
import triton.language as tl

SWEEPS = tl.constexpr(16)  # up to 11 were seen
STOP = tl.constexpr(3e-5)  # a sweep without a larger cosine is the last
SKIP = tl.constexpr(1e-7)  # smaller cosines are rounding
FLOOR = tl.constexpr(4e-14)  # of the longest column's square: what is shorter counts as so long
CUT = tl.constexpr(4e-7)  # up to this share of λ₁ a singular value is rounding: its left vector is zero
SMALL = tl.constexpr(1e-30)
LIFT = tl.constexpr(2.0**80)  # the inverse of a subnormal number is infinite


@triton.jit
def largest_of_group(values, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """The largest value of each group of lanes, in all of its lanes."""
    largest = tl.max(tl.reshape(values, [GROUPS, LANES]), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(largest, [GROUPS, LANES]), [GROUPS * LANES])


@triton.jit
def sum_of_group(values, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """The sum over each group of lanes, in all of its lanes."""
    total = tl.sum(tl.reshape(values, [GROUPS, LANES]), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(total, [GROUPS, LANES]), [GROUPS * LANES])


@triton.jit
def product(first, second, CHUNKS: tl.constexpr):
    """Inner products of the columns of each lane."""
    total = first[0] * second[0]
    for j in tl.static_range(1, CHUNKS):
        total += first[j] * second[j]
    return tl.sum(total, axis=0)


@triton.jit
def load_columns(pointer, at, real, ROWS: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr):
    """The column that starts `at` for each lane, or zeros where it is not `real`."""
    rows = tl.arange(0, R)[:, None]
    column = ()
    for j in tl.static_range((ROWS + R - 1) // R):
        row = rows + j * R
        mask = real[None, :] & (row < ROWS)
        column += (tl.load(pointer + at[None, :] + row * STRIDE, mask=mask, other=0.0),)
    return column


@triton.jit
def store_columns(pointer, at, real, column, factor, ROWS: tl.constexpr, STRIDE: tl.constexpr, R: tl.constexpr):
    """Store `factor` times the column of each `real` lane."""
    rows = tl.arange(0, R)[:, None]
    for j in tl.static_range((ROWS + R - 1) // R):
        row = rows + j * R
        mask = real[None, :] & (row < ROWS)
        tl.store(pointer + at[None, :] + row * STRIDE, column[j] * factor[None, :], mask=mask)


@triton.jit
def unit_columns(index, ROWS: tl.constexpr, R: tl.constexpr):
    """Columns of the identity."""
    rows = tl.arange(0, R)[:, None]
    column = ()
    for j in tl.static_range((ROWS + R - 1) // R):
        column += (tl.where(index[None, :] == rows + j * R, 1.0, 0.0),)
    return column


@triton.jit
def largest_and_poison(column, CHUNKS: tl.constexpr):
    """The largest magnitude of each lane; and zero, or NaN where a number is not finite."""
    largest = tl.max(tl.abs(column[0]), axis=0)
    poison = tl.sum(column[0] * 0.0, axis=0)
    for j in tl.static_range(1, CHUNKS):
        largest = tl.maximum(largest, tl.max(tl.abs(column[j]), axis=0))
        poison += tl.sum(column[j] * 0.0, axis=0)
    return largest, poison


@triton.jit
def rescale(column, clean, lift, inverse, CHUNKS: tl.constexpr):
    """`column * lift * inverse`, or zeros in place of a matrix that is not `clean`."""
    scaled = ()
    for j in tl.static_range(CHUNKS):
        scaled += (tl.where(clean[None, :], column[j] * lift[None, :] * inverse[None, :], 0.0),)
    return scaled


@triton.jit
def rotation(x, y, floor, active, first, exchange, CHUNKS: tl.constexpr):
    """The four factors that make columns X and Y orthogonal, and whether they were not.

    The longer one goes to X where `first`, to Y elsewhere; then both change places where `exchange`. A pair of equal
    lengths stays: so a column of zeros that pads the matrix keeps the last token.
    """
    a = product(x, x, CHUNKS)
    b = product(y, y, CHUNKS)
    g = product(x, y, CHUNKS)
    size = tl.sqrt(tl.maximum(a, floor)) * tl.sqrt(tl.maximum(b, floor))
    gap = b - a
    divisor = tl.abs(gap) + tl.sqrt_rn(gap * gap + 4.0 * g * g)
    rotates = active & (tl.abs(g) > SKIP * size) & (divisor > 0.0)
    tangent = tl.where(rotates, tl.div_rn(2.0 * g, tl.where(rotates, divisor, 1.0)), 0.0)
    tangent = tl.where(gap < 0.0, -tangent, tangent)
    cosine = tl.div_rn(1.0, tl.sqrt_rn(1.0 + tangent * tangent))
    sine = cosine * tangent
    unsorted = active & (((gap > 0.0) & first) | ((gap < 0.0) & (first == 0)))
    swaps = unsorted != exchange
    x_from_x, x_from_y = tl.where(swaps, sine, cosine), tl.where(swaps, cosine, -sine)
    y_from_x, y_from_y = tl.where(swaps, cosine, sine), tl.where(swaps, -sine, cosine)
    oblique = tl.where(active & (tl.abs(g) > STOP * size), 1.0, 0.0)
    return (x_from_x[None, :], x_from_y[None, :], y_from_x[None, :], y_from_y[None, :]), oblique


@triton.jit
def rotate(x, y, factors, source, MOVES_X: tl.constexpr, CHUNKS: tl.constexpr):
    """The pair rotated, and one of them taken from the lane `source`."""
    new_x = ()
    new_y = ()
    for j in tl.static_range(CHUNKS):
        to_x = factors[0] * x[j] + factors[1] * y[j]
        to_y = factors[2] * x[j] + factors[3] * y[j]
        if MOVES_X:
            to_x = tl.gather(to_x, source, 1)
        else:
            to_y = tl.gather(to_y, source, 1)
        new_x += (to_x,)
        new_y += (to_y,)
    return new_x, new_y


@triton.jit
def tokens(t, k, N: tl.constexpr):
    """Tokens t+k and t-k modulo N-1."""
    up, down = t + k, t - k
    return tl.where(up >= N - 1, up - (N - 1), up), tl.where(down < 0, down + (N - 1), down)


@triton.jit
def store_vectors(u_ptr, values_ptr, v_ptr, matrix, token, real, w, v, length, largest, scale, poison,
                  M: tl.constexpr, N: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Store λ, u = w/λ, or zero where λ is rounding, and v as a row, at the place of the token."""
    real = real & (token < N)
    alive = length > CUT * largest
    inverse = tl.where(alive, tl.div_rn(1.0, tl.where(alive, length, 1.0)), 0.0)
    store_columns(u_ptr, matrix * (M * N) + token, real, w, inverse, M, N, R)
    store_columns(v_ptr, matrix * (N * N) + token * N, real, v, inverse * 0.0 + 1.0, N, 1, R)
    tl.store(values_ptr + matrix * N + token, length * scale + poison, mask=real)


@triton.jit
def load_scaled(q_ptr, matrix, k, real, M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
                R: tl.constexpr):  # fmt: skip
    """X and Y of Q divided by its largest number, that number, and NaN in place of zero where one is not finite."""
    CHUNKS: tl.constexpr = (M + R - 1) // R
    other = N + N % 2 - 1 - k
    x = load_columns(q_ptr, matrix * (M * N) + k, real, M, N, R)
    y = load_columns(q_ptr, matrix * (M * N) + other, real & (other < N), M, N, R)
    x_largest, x_poison = largest_and_poison(x, CHUNKS)
    y_largest, y_poison = largest_and_poison(y, CHUNKS)
    poison = sum_of_group(x_poison + y_poison, GROUPS, LANES)
    scale = largest_of_group(tl.maximum(x_largest, y_largest), GROUPS, LANES)
    clean = poison == 0.0
    lift = tl.where(scale < SMALL, LIFT, 1.0)
    scale = tl.where(clean & (scale > 0.0), scale, 1.0)
    inverse = tl.div_rn(1.0, scale * lift)
    return rescale(x, clean, lift, inverse, CHUNKS), rescale(y, clean, lift, inverse, CHUNKS), scale, poison


@triton.jit
def two_rounds(x, y, vx, vy, t, k, after, before, floor, active, EVEN: tl.constexpr, CM: tl.constexpr,
               CN: tl.constexpr):  # fmt: skip
    """Round A and round B, and where a pair was not orthogonal."""
    front = k == 0
    back = k == EVEN // 2 - 1
    up, down = tokens(t, k, EVEN)
    factors, oblique = rotation(x, y, floor, active, (up < down) | front, front, CM)
    x, y = rotate(x, y, factors, after, True, CM)
    vx, vy = rotate(vx, vy, factors, after, True, CN)
    up = tl.where(up == EVEN - 2, 0, up + 1)
    factors, also = rotation(x, y, floor, active, (up < down) & (back == 0), back, CM)
    x, y = rotate(x, y, factors, before, False, CM)
    vx, vy = rotate(vx, vy, factors, before, False, CN)
    return x, y, vx, vy, tl.maximum(oblique, also)


@triton.jit(do_not_specialize=["batch"])
def decompose(q_ptr, u_ptr, values_ptr, v_ptr, batch, M: tl.constexpr, N: tl.constexpr, LANES: tl.constexpr,
              GROUPS: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """Q `(batch, M, N)` = U diag(λ) Vᵀ with falling λ, `GROUPS` matrices at a time, `LANES` lanes for each.

    An odd N is padded by a column of zeros. A bad number makes λ of its matrix NaN.
    """
    EVEN: tl.constexpr = N + N % 2
    PAIRS: tl.constexpr = EVEN // 2
    CM: tl.constexpr = (M + R - 1) // R
    CN: tl.constexpr = (EVEN + R - 1) // R
    lane = tl.arange(0, GROUPS * LANES)
    k = lane % LANES
    matrix = tl.program_id(0).to(tl.int64) * GROUPS + lane // LANES
    real = (matrix < batch) & (k < PAIRS)
    x, y, scale, poison = load_scaled(q_ptr, matrix, k, real, M, N, LANES, GROUPS, R)
    vx = unit_columns(k, EVEN, R)
    vy = unit_columns(EVEN - 1 - k, EVEN, R)
    after = lane - k + tl.where(k < PAIRS, tl.where(k == PAIRS - 1, 0, k + 1), k)
    before = lane - k + tl.where(k < PAIRS, tl.where(k == 0, PAIRS - 1, k - 1), k)
    after = tl.broadcast_to(after[None, :], [R, GROUPS * LANES])
    before = tl.broadcast_to(before[None, :], [R, GROUPS * LANES])

    active = real  # a matrix that is done stays as it is, so that it does not feel its neighbours
    going = 1.0
    sweep = 0
    t = 0
    while (going > 0.0) & (sweep < SWEEPS):
        floor = FLOOR * largest_of_group(tl.maximum(product(x, x, CM), product(y, y, CM)), GROUPS, LANES)
        worst = floor * 0.0
        for _ in range(PAIRS):
            x, y, vx, vy, oblique = two_rounds(x, y, vx, vy, t, k, after, before, floor, active, EVEN, CM, CN)
            worst = tl.maximum(worst, oblique)
            t = tl.where(t == EVEN - 2, 0, t + 1)
        active = largest_of_group(worst, GROUPS, LANES) > 0.0
        going = tl.max(worst, axis=0)
        sweep += 1

    up, down = tokens(t, k, EVEN)
    down = tl.where(k == 0, EVEN - 1, down)
    x_length = tl.sqrt_rn(product(x, x, CM))
    y_length = tl.sqrt_rn(product(y, y, CM))
    largest = largest_of_group(tl.maximum(x_length, y_length), GROUPS, LANES)
    store_vectors(u_ptr, values_ptr, v_ptr, matrix, up, real, x, vx, x_length, largest, scale, poison, M, N, R)
    store_vectors(u_ptr, values_ptr, v_ptr, matrix, down, real, y, vy, y_length, largest, scale, poison, M, N, R)
