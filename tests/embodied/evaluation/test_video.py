"""Videos: episodes equal those of evaluation, tiles are placed correctly, files are complete or absent."""

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
import pytest
import torch

from embodied.evaluation import video
from embodied.evaluation.evaluation import evaluate
from embodied.evaluation.video import Film, film, tile, write_video
from embodied.policy import Decision
from tests.embodied.reach import Reach


class Homing:
    """Moves towards the origin by at most `speed`; decides every 4 actions."""

    def __init__(self, speed):
        self.contract, self.speed = Reach(1, executed=4, horizon=4).contract, speed

    def act(self, observation, *, deterministic=False, generator=None):
        assert deterministic
        position = observation["position"].unsqueeze(1).expand(-1, 4, 1)
        # All four at once overshoot, so that the decision rate affects the outcome.
        return Decision(-position.sign() * self.speed, observation, torch.zeros(len(position), 1, 1))


def camera(env):
    """Images whose grey level is the position of the point."""

    def render(ids):
        level = (128 + 100 * env.position[torch.as_tensor(ids)]).round().to(torch.uint8).numpy()
        return np.broadcast_to(level[:, None, None, None], (len(ids), 8, 10, 3)).copy()

    return render


def test_a_filmed_episode_is_the_evaluated_one():
    env = Reach(3, executed=2, horizon=2, tasks=1, step_limit=6)
    filmed = film(env, Homing(0.24), torch.tensor([0, 1, 4]), camera(env))
    measured = evaluate(Reach(3, executed=4, horizon=4, tasks=1, step_limit=6), Homing(0.24), starts_per_task=5)
    np.testing.assert_array_equal(filmed.success[-1], measured.success[0, [0, 1, 4]].numpy())
    # From -0.35 it overshoots for four actions, then turns: -0.11 0.13 0.37 0.61 0.37 0.13.
    np.testing.assert_array_equal(filmed.frames[:, 1, 0, 0, 0], [128 - 35, 128 + 13, 128 + 61, 128 + 13])


def test_a_film_shows_the_start_and_stands_still_after_the_end():
    env = Reach(2, executed=1, horizon=1, tasks=1, step_limit=6)
    filmed = film(env, Homing(0.22), torch.tensor([0, 6]), camera(env))  # from 0.3 in 1 step, from 0.6 in 3
    np.testing.assert_array_equal(filmed.frames[:, 0, 0, 0, 0], [158, 136, 136, 136])
    np.testing.assert_array_equal(filmed.frames[:, 1, 0, 0, 0], [188, 166, 144, 122])
    np.testing.assert_array_equal(filmed.success, [[False, False], [True, False], [True, False], [True, True]])


def test_frames_can_be_fewer_than_chunks():
    env = Reach(2, executed=1, horizon=1, tasks=1, step_limit=6)
    every = film(env, Homing(0.22), torch.tensor([0, 6]), camera(env))
    fewer = film(env, Homing(0.22), torch.tensor([0, 6]), camera(env), stride=2)
    np.testing.assert_array_equal(fewer.frames, every.frames[[0, 2, 3]])  # the end is always shown
    np.testing.assert_array_equal(fewer.success, every.success[[0, 2, 3]])


def test_chunks_that_do_not_fit_are_refused():
    env = Reach(1, executed=3, horizon=3)
    with pytest.raises(ValueError, match="executed=4 of the policy to be a multiple of the environment's 3"):
        film(env, Homing(0.1), torch.tensor([0]), camera(env))


def solid(*levels):
    """Film [len(levels), 2, 6, 8, 3] of one grey level per frame, the second episode won in the last frame."""
    frames = np.broadcast_to(np.array(levels, dtype=np.uint8)[:, None, None, None, None], (len(levels), 2, 6, 8, 3))
    success = np.zeros((len(levels), 2), dtype=np.bool_)
    success[-1, 1] = True
    return Film(frames, success)


def test_rows_are_films_and_columns_episodes():
    tiled = tile({"before": solid(10, 20, 30), "after": solid(40, 50)})
    row = video.STRIP + 6 + 2 * video.MARGIN
    assert tiled.shape == (3, 2 * row, 2 * (8 + 2 * video.MARGIN), 3)
    inside = tiled[:, [video.STRIP + video.MARGIN, row + video.STRIP + video.MARGIN]][:, :, [video.MARGIN, -8]]
    np.testing.assert_array_equal(inside[..., 0], [[[10, 10], [40, 40]], [[20, 20], [50, 50]], [[30, 30], [50, 50]]])
    rim = video.STRIP + video.MARGIN - 1
    assert tuple(tiled[-1, rim, -8]) == video.SUCCESS
    assert tuple(tiled[-1, rim, video.MARGIN]) == video.PAPER
    assert tuple(tiled[0, rim, -8]) == video.PAPER


def test_captions_and_titles_are_written():
    film_ = solid(10)
    plain, titled = tile({"SFT": film_}), tile({"SFT": film_}, ("pick up the milk", "pick up the butter"))
    assert titled.shape[1] > plain.shape[1]
    assert (plain[0, : video.STRIP] == 235).any()
    assert (titled[0, : titled.shape[1] - plain.shape[1]] == 235).any()
    assert (tile({"RL": film_}) != plain).any()


def test_films_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="films of one size"):
        tile({"a": solid(1), "b": Film(np.zeros((1, 3, 6, 8, 3), np.uint8), np.zeros((1, 3), np.bool_))})
    with pytest.raises(ValueError, match="a title per column"):
        tile({"a": solid(1)}, ("only one",))


def test_a_written_video_plays_back(tmp_path):
    frames = np.zeros((7, 33, 47, 3), dtype=np.uint8)  # odd sizes, which H.264 refuses
    frames[:, :, :24] = (200, 40, 40)
    frames[4:, 16:] = (40, 40, 200)
    write_video(tmp_path / "video.mp4", frames, fps=10)
    read = iio.imread(tmp_path / "video.mp4", plugin="FFMPEG").astype(int)
    assert read.shape == (7, 34, 48, 3)
    for picture, (row, column) in ((0, (5, 5)), (0, (30, 40)), (6, (30, 5))):
        np.testing.assert_allclose(read[picture, row, column], frames[picture, row, column], atol=30)
    assert [path.name for path in tmp_path.iterdir()] == ["video.mp4"]


@pytest.mark.parametrize(
    "frames", [np.zeros((0, 8, 8, 3), np.uint8), np.zeros((2, 8, 8, 3)), np.zeros((2, 8, 8), np.uint8)]
)
def test_other_frames_are_refused(tmp_path, frames):
    with pytest.raises(ValueError, match=r"expected frames uint8 \[T, height, width, 3\]"):
        write_video(tmp_path / "video.mp4", frames, fps=10)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_where_encoding_fails(tmp_path, monkeypatch):
    def broken(path, *args, **kwargs):
        with open(path, "wb") as file:
            file.write(b"half a vid")
        yield
        raise OSError("disk full")

    monkeypatch.setattr(imageio_ffmpeg, "write_frames", broken)
    (tmp_path / "video.mp4").write_bytes(b"older")
    with pytest.raises(OSError, match="disk full"):
        write_video(tmp_path / "video.mp4", np.zeros((2, 8, 8, 3), np.uint8), fps=10)
    assert (tmp_path / "video.mp4").read_bytes() == b"older"
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="positive frame rate"):
        write_video(tmp_path / "video.mp4", np.zeros((2, 8, 8, 3), np.uint8), fps=0)
