"""Limits of position, velocity, acceleration and jerk that can always be kept together.

Clipping each derivative alone fails: at full speed one step before a position limit no acceleration is enough. Here a
step is taken only together with a way to stop from it that is inside all limits. That way is kept: whatever is asked
for next, its first step is there to be taken, so no state is ever reached from which the next step can't keep every
limit. (A stored stop is a backup controller that certifies viability: Gurriet et al., arXiv:1903.05697 in spirit; the
stop itself is the time-optimal one of jerk-limited motion, rounded to whole periods.) Motion inside all limits passes
unchanged.

Time is counted in control periods: w = velocity dt, b = acceleration dt^2 and c = jerk dt^3 are the first three
backward differences of the position p, as a robot's driver would compute them from its commands:
    b' = b + c    w' = w + b'    p' = p + w'
"""

from __future__ import annotations

import math

INF = math.inf


class Axis:
    """One limited element, in periods: p, w, b and the stop that is kept.

    Args:
        low, high: of p.
        slowest, fastest: of w; slowest <= 0 <= fastest.
        most_b: of |b|.
        most_c: of |c|.
    """

    __slots__ = ("b", "fastest", "high", "low", "most_b", "most_c", "p", "slowest", "stop", "w")

    def __init__(
        self, low: float, high: float, slowest: float, fastest: float, most_b: float = INF, most_c: float = INF
    ) -> None:
        self.low, self.high = low, high
        # what is not limited becomes a number that never binds: nothing inside the limits above it can exceed it
        self.slowest, self.fastest = max(slowest, low - high), min(fastest, high - low)
        self.most_b = min(most_b, self.fastest - self.slowest)
        self.most_c = min(most_c, 2.0 * self.most_b)
        self.start(0.0)

    def start(self, position: float, velocity: float = 0.0) -> None:
        """At `position`, with w = `velocity` and no acceleration."""
        self.p, self.w, self.b = position, velocity, 0.0
        self.stop: list[tuple[float, int]] = []

    def toward(self, target: float) -> float:
        """Move one period toward the position `target`, without passing it where it is out of one period's reach."""
        if self.most_c == INF:
            self.p = target
            return target
        target = min(max(target, self.low), self.high)
        if not self._take(target - self.p - self.w):
            error, walls = target - self.p, (self.low, self.high)
            # the target is a wall too, but where the stop that is kept already ends behind it
            if error > 0.0:
                self.high = min(max(target, self._stopped_at()), self.high)
            else:
                self.low = max(min(target, self._stopped_at()), self.low)
            self._approach(math.copysign(min(abs(error), self._speed_to_stop_in(abs(error))), error))
            self.low, self.high = walls
            self.p = min(max(self.p, self.low), self.high)  # a stop's last step may round past the wall it ends at
        return self.p

    def at_velocity(self, w: float) -> float:
        """Move one period with the velocity `w` as nearly as limits allow; returns w."""
        if self.most_c == INF:
            self.w = w
        elif not self._take(w - self.w):
            self._approach(w)
        return self.w

    def _approach(self, w: float) -> None:
        """Take the step toward the velocity `w` that goes as far as there is a stop from."""
        change = min(max(w, self.slowest), self.fastest) - self.w
        size = abs(change)
        # b' + (b' - c) + ... = change: the last b before it must fall to zero again
        b = math.copysign(min(size, 0.5 * (math.sqrt(self.most_c * (self.most_c + 8.0 * size)) - self.most_c)), change)
        b = min(max(b, self.b - self.most_c, -self.most_b), self.b + self.most_c, self.most_b)
        kept = self.b + self.stop[0][0] if self.stop else 0.0
        share = 1.0
        for _ in range(6):
            if self._take(kept + share * (b - kept)):
                return
            share *= 0.5
        self._keep_stopping()

    def _speed_to_stop_in(self, distance: float) -> float:
        """The w from which braking, jerk included, needs at most `distance`: w^2 / 2B + w B / 2C = distance."""
        if self.most_b == INF:
            return INF
        lag = 0.5 * self.most_b / self.most_c
        return self.most_b * (math.sqrt(lag * lag + 2.0 * distance / self.most_b) - lag)

    def _stopped_at(self) -> float:
        """Where the stop that is kept ends."""
        p, w, b = self.p, self.w, self.b
        for c, n in self.stop:
            p += n * w + n * (n + 1) * (0.5 * b + c * (n + 2) / 6.0)
            w += n * b + 0.5 * c * n * (n + 1)
            b += n * c
        return p

    def _keep_stopping(self) -> None:
        """Take the first step of the stop that is kept."""
        if not self.stop:
            self.w = self.b = 0.0
            return
        c, steps = self.stop[0]
        self.b += c
        self.w += self.b
        self.p += self.w
        if steps > 1:
            self.stop[0] = (c, steps - 1)
        else:
            del self.stop[0]

    def _take(self, b: float) -> bool:
        """Take the step with acceleration `b` where it is inside the limits and leaves a way to stop."""
        w = self.w + b
        if (
            not (-self.most_b <= b <= self.most_b and self.slowest <= w <= self.fastest)
            or abs(b - self.b) > self.most_c
        ):
            return False
        p = self.p + w
        if (p > self.high and w > 0.0) or (p < self.low and w < 0.0):
            return False
        stop = self._stop_from(p, w, b)
        if stop is None:
            return False
        self.p, self.w, self.b, self.stop = p, w, b, stop
        return True

    def _stop_from(self, p: float, w: float, b: float) -> list[tuple[float, int]] | None:
        """A stop from p, w, b as [(c, periods), ...] that keeps all limits, or None where none is found.

        Time-optimal but for whole periods: b goes to -peak, stays, and returns to zero with w. Mirrored so that w would
        be positive if b ceased.
        """
        C = self.most_c
        periods = math.ceil(abs(b) / C)
        side = 1.0 if w + 0.5 * b * (periods - 1) >= 0.0 else -1.0
        w, b = side * w, side * b
        fastest, ahead, behind = (
            (self.fastest, max(self.high - p, 0.0), max(p - self.low, 0.0))
            if side > 0
            else (-self.slowest, max(p - self.low, 0.0), max(self.high - p, 0.0))
        )
        rise, hold, fall = self._durations(w, b)
        for _ in range(4):
            peak = (w + 0.5 * b * (rise - 1)) / (0.5 * (rise + fall) + hold)
            if peak < 0.0:
                return None
            if abs(peak + b) > C * rise:
                rise += 1
            elif peak > C * fall:
                fall += 1
            elif peak > self.most_b:
                hold += 1
            else:
                break
        else:
            return None
        c = -(peak + b) / rise
        if not self._fits(w, b, c, (rise, hold, fall), peak, fastest, ahead, behind):
            return None
        stop = [(side * c, rise), (0.0, hold), (side * peak / fall, fall)]
        return [segment for segment in stop if segment[1]] if not hold else stop

    def _durations(self, w: float, b: float) -> tuple[int, int, int]:
        """Whole periods of the fastest stop: falling to the peak, staying there, returning."""
        B, C = self.most_b, self.most_c
        peak = math.sqrt(max(C * w + 0.5 * b * b, 0.0))
        if peak <= B:
            return max(math.ceil((b + peak) / C), 1), 0, max(math.ceil(peak / C), 1)
        hold = math.ceil((w + 0.5 * b * b / C - B * B / C) / B)
        return max(math.ceil((b + B) / C), 1), max(hold, 0), max(math.ceil(B / C), 1)

    @staticmethod
    def _fits(
        w: float, b: float, c: float, periods: tuple[int, int, int], peak: float, fastest: float, ahead: float,
        behind: float,
    ) -> bool:  # fmt: skip
        """Whether the stop stays within `fastest`, the room `ahead` and the room `behind`."""
        rise, hold, fall = periods
        if b > 0.0:  # still gaining speed
            n = min(int(-b / c), rise)
            if w + n * b + 0.5 * c * n * (n + 1) > fastest:
                return False
        if w < 0.0:  # still moving backward, until w changes sign
            half = b + 0.5 * c
            root = math.sqrt(max(half * half - 2.0 * c * w, 0.0))
            n = min(int((root - half) / c) if c else 0, rise)
            if n * w + 0.5 * b * n * (n + 1) + c * n * (n + 1) * (n + 2) / 6.0 < -behind:
                return False
        distance = rise * w + rise * (rise + 1) * (0.5 * b + c * (rise + 2) / 6.0)
        w += rise * b + 0.5 * c * rise * (rise + 1)
        distance += hold * w - 0.5 * peak * hold * (hold + 1)
        w -= hold * peak
        return distance + fall * w - peak * (fall + 1) * (0.5 * fall - (fall + 2) / 6.0) <= ahead
