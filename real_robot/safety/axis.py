"""Limits of position, velocity, acceleration and jerk that can always be met together.

Clipping each derivative separately fails: at full speed one step before a position limit no acceleration is enough.
Here a step is taken only if a stop from there stays inside all limits. That stop is stored: for any next request, its
first step remains available, so no state is ever reached from which the next step can't meet every limit. (The stored
stop is a backup controller that certifies viability, in the spirit of Gurriet et al., arXiv:1903.05697; it is the
time-optimal stop of jerk-limited motion, rounded to whole periods.) Motion inside all limits is not changed.

Time is counted in control periods: w = velocity dt, b = acceleration dt^2 and c = jerk dt^3 are the first three
backward differences of the position p, as a robot's driver would compute them from its commands:
    b' = b + c    w' = w + b'    p' = p + w'
"""

from __future__ import annotations

import math

INF = math.inf


Box = tuple[float, float, float, float]
"""Bounds of a stop: low and high of p, slowest and fastest w."""
Stop = list[tuple[float, int]]
"""Pairs of a constant c and a number of periods, in order."""
HALVINGS = 6
ROUNDING = 5e-16
NOTHING = 1e-12
"""Share of the largest acceleration in a period that rounding may leave of a speed of zero."""
ARRIVED = 1e-3
"""Share of the largest acceleration and jerk that may be left over where a motion ends."""


class Axis:
    """One limited element, in units of periods: p, w, b and the stored stop.

    Args:
        low: lower limit of p; -inf if unlimited.
        high: upper limit of p; inf if unlimited.
        slowest: lower limit of w, at most 0.
        fastest: upper limit of w, at least 0.
        most_b: limit of |b|.
        most_c: limit of |c|.
        pause: periods for which the velocity may continue unchanged before a stop begins, because commands are missing.
    """

    __slots__ = (
        "_little",
        "_stop",
        "_target",
        "b",
        "fastest",
        "high",
        "low",
        "most_b",
        "most_c",
        "p",
        "pause",
        "slowest",
        "w",
    )

    def __init__(
        self,
        low: float,
        high: float,
        slowest: float,
        fastest: float,
        most_b: float = INF,
        most_c: float = INF,
        pause: float = 0.0,
    ) -> None:
        self.low = low
        self.high = high
        self.pause = pause
        # missing limits become numbers that never bind, given the limits on the lower derivatives
        self.slowest = max(slowest, low - high)
        self.fastest = min(fastest, high - low)
        self.most_b = min(most_b, self.fastest - self.slowest)
        self.most_c = min(most_c, 2.0 * self.most_b)
        self._little = 0.0 if self.most_c == INF else ARRIVED * min(self.most_b, self.most_c)
        self.start(0.0)

    def start(self, position: float) -> None:
        """Start at rest at `position`."""
        self.p = self._target = position
        self.w = self.b = 0.0
        self._stop: Stop = []

    def toward(self, target: float) -> float:
        """Move one period toward the position `target`; returns p.

        A target out of reach is approached so that it is met and not passed if it keeps moving as it did.
        """
        if self.most_c == INF:
            self.p = target
            return target
        target = min(max(target, self.low), self.high)
        speed = min(max(target - self._target, self.slowest), self.fastest)
        self._target = target
        if not self._take(target - self.p - self.w):
            self._approach(self._meet(target, speed))
            self.p = min(max(self.p, self.low), self.high)  # a stop's last step may round past the wall it ends at
        return self.p

    def at_velocity(self, w: float) -> float:
        """Move one period with the velocity closest to `w` that the limits allow; returns w."""
        if self.most_c == INF:
            self.w = w
        elif not self._take(w - self.w):
            self._approach(self._gain(w))
        return self.w

    def rest_at(self, target: float) -> float:
        """Move one period toward standing still at the position `target`, without passing it if that is possible."""
        if self.most_c == INF:
            self.p = target
            return target
        low = self.low
        high = self.high
        target = self._target = min(max(target, low), high)
        if self.p < target:
            self.high = target
        else:
            self.low = target
        if not self._take(target - self.p - self.w):
            self._approach(self._meet(target, 0.0))
        self.low = low
        self.high = high
        self.p = min(max(self.p, low), high)
        if max(abs(target - self.p), abs(self.w), abs(self.b)) <= self._little:
            self.p = target
            self.w = 0.0
            self.b = 0.0
            self._stop = []
        return self.p

    def stop(self) -> None:
        """Move one period of the certified stop; without limits it stands still at once."""
        self._keep_stopping()
        if abs(self.w) <= NOTHING * self.most_b:
            self.w = 0.0
        if not self._stop or max(abs(self.w), abs(self.b)) <= self._little:
            self.w = self.b = 0.0
            self._stop = []

    @property
    def still(self) -> bool:
        """Whether the element stands still."""
        return not self._stop and self.w == self.b == 0.0

    def _meet(self, target: float, speed: float) -> float:
        """The largest b from which `target`, moving at `speed`, can be met without passing it."""
        # speed that still brakes within the error, relative to the target's: w = speed + sign(e) w_stop(|e|)
        error = target - self.p
        desired = self._gain(speed + math.copysign(min(abs(error), self._speed_to_stop_in(abs(error))), error))
        box = (-INF, target, -INF, INF) if error > 0.0 else (target, INF, -INF, INF)
        braking = self._reach(math.copysign(INF, -error))
        # bisection between the hardest braking, which may pass the target least, and a b that passes it
        passing = desired
        best = braking
        b = desired
        for _ in range(HALVINGS):
            w = self.w + b
            if self._stop_from(self.p + w, w - speed, b, box) is None:
                passing = b
            elif b == desired:
                return b
            else:
                best = b
            b = 0.5 * (best + passing)
        return best

    def _gain(self, w: float) -> float:
        """The b that leads to the velocity `w` while decreasing to zero: b + (b - c) + ... = change."""
        # c n (n + 1) / 2 = |change| with b = c n, solved for b: b = (sqrt(c (c + 8 |change|)) - c) / 2
        change = min(max(w, self.slowest), self.fastest) - self.w
        size = abs(change)
        b = min(size, 0.5 * (math.sqrt(self.most_c * (self.most_c + 8.0 * size)) - self.most_c))
        return self._reach(math.copysign(b, change))

    def _reach(self, b: float) -> float:
        """`b` clipped to what the next period can reach."""
        return min(max(b, self.b - self.most_c, -self.most_b), self.b + self.most_c, self.most_b)

    def _speed_to_stop_in(self, distance: float) -> float:
        """The w from which braking, jerk included, needs at most `distance`: w^2 / 2B + w B / 2C = distance."""
        if self.most_b == INF:
            return INF
        # w = B (sqrt(lag^2 + 2 distance / B) - lag) with lag = B / 2C
        lag = 0.5 * self.most_b / self.most_c
        return self.most_b * (math.sqrt(lag * lag + 2.0 * distance / self.most_b) - lag)

    def _approach(self, b: float) -> None:
        """Take the step closest to `b`, starting from the stored stop, that still allows a stop."""
        stopping = self.b + self._stop[0][0] if self._stop else 0.0
        share = 1.0
        for _ in range(HALVINGS):
            if self._take(stopping + share * (b - stopping)):
                return
            share *= 0.5
        self._keep_stopping()

    def _keep_stopping(self) -> None:
        """Take the first step of the stored stop."""
        if not self._stop:
            self.w = self.b = 0.0
            return
        c, steps = self._stop[0]
        self.b += c
        self.w += self.b
        self.p += self.w
        if steps > 1:
            self._stop[0] = (c, steps - 1)
        else:
            del self._stop[0]

    def _take(self, b: float) -> bool:
        """Take the step with acceleration `b` if it is inside the limits and allows a stop."""
        requested = self.w + b
        w = min(max(requested, self.slowest), self.fastest)
        # a value at a limit may exceed it by rounding, which is accepted
        if abs(requested - w) > ROUNDING * (abs(w) + abs(b)) or abs(b) > self.most_b:
            return False
        if abs(b - self.b) > self.most_c + ROUNDING * self.most_b:
            return False
        p = self.p + w
        low, high = self._room(w, b)
        if (p > high and w > 0.0) or (p < low and w < 0.0):
            return False
        stop = self._stop_from(p, w, b, (low, high, self.slowest, self.fastest))
        if stop is None:
            return False
        self.p = p
        self.w = w
        self.b = b
        self._stop = stop
        return True

    def _room(self, w: float, b: float) -> tuple[float, float]:
        """Low and high of p, less what the fastest velocity of a stop from `w` and `b` covers in a pause."""
        if not self.pause:
            return self.low, self.high
        # velocity gained while b decreases by c per period: b^2 / 2c + b / 2
        gained = math.copysign(0.5 * abs(b) * (abs(b) / self.most_c + 1.0), b)  # until the acceleration has ceased
        slowest = min(w, w + gained, 0.0)
        fastest = max(w, w + gained, 0.0)
        return self.low - self.pause * slowest, self.high - self.pause * fastest

    def _stop_from(self, p: float, w: float, b: float, box: Box) -> Stop | None:
        """Return a stop from p, w, b that stays in `box`, or None if there is none of this form.

        Time-optimal up to whole periods: b goes to -peak, stays, and returns to zero with w. Mirrored so that w would
        be positive if b ceased.
        """
        C, (low, high, slowest, fastest) = self.most_c, box
        periods = math.ceil(abs(b) / C)
        ahead = max(high - p, 0.0)
        behind = max(p - low, 0.0)
        side = 1.0
        if w + 0.5 * b * (periods - 1) < 0.0:
            side, w, b, fastest, ahead, behind = -1.0, -w, -b, -slowest, behind, ahead
        rise, hold, fall = self._durations(w, b)
        extra = 1
        for _ in range(12):
            # the b of all periods add up to -w: w + b (rise - 1) / 2 = peak ((rise + fall) / 2 + hold)
            peak = (w + 0.5 * b * (rise - 1)) / (0.5 * (rise + fall) + hold)
            if abs(peak + b) > C * rise:
                rise = max(min(rise + extra, periods), rise + 1)
                extra *= 2
            elif peak > C * fall:
                fall += 1
            elif peak > self.most_b:
                hold += 1
            else:
                break
        else:
            return None
        c = -(peak + b) / rise
        if peak < 0.0 or not _fits(w, b, c, (rise, hold, fall), peak, (fastest, ahead, behind)):
            return None
        if hold:
            return [(side * c, rise), (0.0, hold), (side * peak / fall, fall)]
        return [(side * c, rise), (side * peak / fall, fall)]

    def _durations(self, w: float, b: float) -> tuple[int, int, int]:
        """Whole periods of the fastest stop: ramping to the peak, staying there, returning."""
        B = self.most_b
        C = self.most_c
        # continuous time: w + b^2 / 2C - peak^2 / C = 0 without a phase at the limit B
        peak = math.sqrt(max(C * w + 0.5 * b * b, 0.0))
        if peak <= B:
            return max(math.ceil((b + peak) / C), 1), 0, max(math.ceil(peak / C), 1)
        hold = math.ceil((w + 0.5 * b * b / C - B * B / C) / B)
        return max(math.ceil((b + B) / C), 1), hold, max(math.ceil(B / C), 1)


def _fits(
    w: float, b: float, c: float, periods: tuple[int, int, int], peak: float, room: tuple[float, float, float]
) -> bool:
    """Whether the stop stays within `room`: the fastest w, the distance ahead and the distance behind."""
    (rise, hold, fall), (fastest, ahead, behind) = periods, room
    if b > 0.0:  # still gaining speed
        n = min(int(-b / c), rise)
        if w + n * b + 0.5 * c * n * (n + 1) > fastest:
            return False
    if w < 0.0:  # still moving backward, until w changes sign
        half = b + 0.5 * c
        n = min(int((math.sqrt(max(half * half - 2.0 * c * w, 0.0)) - half) / c) if c else 0, rise)
        if n * w + n * (n + 1) * (0.5 * b + c * (n + 2) / 6.0) < -behind:
            return False
    # after n periods of constant c: w_n = w + n b + c n (n + 1) / 2, p_n = n w + n (n + 1) (b / 2 + c (n + 2) / 6)
    distance = rise * w + rise * (rise + 1) * (0.5 * b + c * (rise + 2) / 6.0)
    w += rise * b + 0.5 * c * rise * (rise + 1)
    distance += hold * w - 0.5 * peak * hold * (hold + 1)
    w -= hold * peak
    return distance + fall * w - peak * (fall + 1) * (0.5 * fall - (fall + 2) / 6.0) <= ahead
