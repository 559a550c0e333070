"""Turbulence around a hovering drone: Dryden's spectra at low altitude (MIL-F-8785C, 3.7.2), driven by the mean wind.

The drone is treated as standing still in the wind, so that turbulence is carried past it at the wind's speed W. Its
states have no unit: deviations and time constants follow from W, so that air without wind has no gusts. Along the wind
the filter is of first order, across it and vertically of second, with the zero that the standard gives it.
"""

from __future__ import annotations

from sims.quadrotor.physics.dynamics import AIR_ROWS, DT_S
from sims.tracer.arithmetic import Rows, Value, sqrt, squares

HEIGHT_M = 1.0
ALONG_M = 7.9 * HEIGHT_M
VERTICAL_M = HEIGHT_M
"""Length scales of the turbulence near the ground; across the wind the scale along it is used."""
ALONG = 0.2
VERTICAL = 0.1
"""Standard deviations of the gusts as shares of the wind's speed; across the wind the share along it is used."""
ROOT_3 = 3.0**0.5
ROOT_HALF = 0.5**0.5


def begin(noise: Rows) -> Rows:
    """Stationary states from `AIR_ROWS` standard normal numbers."""
    along, across, second_across, vertical, second_vertical = noise[:AIR_ROWS]
    return [
        along,
        *(across, 0.5 * (across + second_across)),
        *(vertical, 0.5 * (vertical + second_vertical)),
    ]


def after(states: Rows, wind: Rows, noise: Rows) -> Rows:
    """Filter states one step later, driven by three standard normal numbers."""
    speed = _speed(wind)
    # A gust of length L passes in L / W seconds, so that a step covers the share W dt / L of the time constant.
    along = speed * (DT_S / ALONG_M)
    slow = speed * (DT_S / VERTICAL_M)
    u, v, v_slow, w, w_slow = states
    return [
        _first(u, along, noise[0]),
        *(_first(v, along, noise[1]), v_slow + along * (v - v_slow)),
        *(_first(w, slow, noise[2]), w_slow + slow * (w - w_slow)),
    ]


def velocity(states: Rows, wind: Rows) -> Rows:
    """Velocity of the air, m/s, world: the horizontal mean `wind` and the gusts."""
    speed, (u, v, v_slow, w, w_slow) = _speed(wind), states
    # direction of the mean wind
    x = wind[0] / speed
    y = wind[1] / speed
    along = ALONG * speed * u
    across = ALONG * speed * _second(v, v_slow)
    return [
        wind[0] + x * along - y * across,
        wind[1] + y * along + x * across,
        wind[2] + VERTICAL * speed * _second(w, w_slow),
    ]


def _speed(wind: Rows) -> Value:
    return sqrt(squares(wind[:2]) + 1e-6)  # the small term keeps the gradient finite in still air


def _first(state: Value, share: Value, noise: Value) -> Value:
    """A first-order filter of unit variance whose time constant is 1 / `share` steps."""
    # x' = k x + sqrt(1 - k^2) n keeps the variance at 1.
    decay = 1.0 - share
    return decay * state + sqrt(1.0 - decay * decay) * noise


def _second(first: Value, second: Value) -> Value:
    """(1 + sqrt(3) T s) / (1 + T s)^2 of unit variance, from the states behind one and two lags."""
    return ROOT_HALF * (ROOT_3 * first + (1.0 - ROOT_3) * second)
