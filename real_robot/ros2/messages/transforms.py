"""Frames from /tf and /tf_static, for nodes that need the newest pose of one frame in another.

ROS's own listener (tf2_ros) also interpolates in time and needs a ROS installation. This module reads the same messages
and uses the newest of every transform, as tf2 does at time zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from embodied.errors import UserError
from real_robot.ros2.messages import frames
from real_robot.ros2.messages.codecs import Message, vector


@dataclass(frozen=True)
class Transform:
    """Pose of a frame in another: `position` [3] m, `rotation` [3, 3], measured at `stamp_s` (infinite: static)."""

    position: np.ndarray
    rotation: np.ndarray
    stamp_s: float = math.inf

    def then(self, inner: Transform) -> Transform:
        """The pose of a frame that has the pose `inner` in this one."""
        # T_ac = T_ab T_bc: p = p_ab + R_ab p_bc, R = R_ab R_bc
        position = self.position + self.rotation @ inner.position
        return Transform(position, self.rotation @ inner.rotation, min(self.stamp_s, inner.stamp_s))

    def inverse(self) -> Transform:
        """The pose of the other frame in this one."""
        # T^-1: p = -R^T p, R = R^T
        return Transform(-self.rotation.T @ self.position, self.rotation.T, self.stamp_s)


IDENTITY = Transform(np.zeros(3), np.eye(3))


class Frames:
    """The tree of all published frames."""

    def __init__(self) -> None:
        self._above: dict[str, tuple[str, Transform]] = {}

    def forget(self) -> None:
        """Drop moving frames, for a clock that has jumped back: their stamps would be in the future."""
        self._above = {name: (parent, pose) for name, (parent, pose) in self._above.items() if math.isinf(pose.stamp_s)}

    def take(self, message: Message, static: bool) -> None:
        """Store the transforms of a tf2_msgs/TFMessage of /tf or /tf_static.

        Raises:
            UserError: for a transform without a rotation; then no transform of the message is stored.
        """
        transforms = {}
        for entry in message.transforms:
            q = entry.transform.rotation
            stamp = entry.header.stamp
            rotation = frames.matrix(frames.wxyz((q.x, q.y, q.z, q.w)))
            stamp_s = math.inf if static else stamp.sec + 1e-9 * stamp.nanosec
            pose = Transform(vector(entry.transform.translation), rotation, stamp_s)
            transforms[entry.child_frame_id.lstrip("/")] = entry.header.frame_id.lstrip("/"), pose
        self._above |= transforms

    def pose(self, frame: str, of: str) -> Transform:
        """The pose of frame `of` in `frame`.

        Raises:
            UserError: if the frames are not connected, as before the first message.
        """
        up = self._path(frame)
        down = self._path(of)
        for root, pose_in_root in up.items():
            if root in down:
                return pose_in_root.inverse().then(down[root])
        raise UserError(f"no transform from {of!r} to {frame!r} on /tf; known frames: {sorted(self._above)}")

    def _path(self, frame: str) -> dict[str, Transform]:
        """The pose of `frame` in itself and in every frame above it, from the bottom up."""
        path = {frame: IDENTITY}
        pose = IDENTITY
        while frame in self._above:
            frame, above = self._above[frame]
            if frame in path:
                raise UserError(f"the frames on /tf go in a circle at {frame!r}")
            pose = above.then(pose)
            path[frame] = pose
        return path
