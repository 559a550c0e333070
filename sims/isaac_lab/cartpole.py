"""A cartpole as a USD file, for machines that cannot reach NVIDIA's server.

The dimensions are our own: a cart of 1 kg on a rail of 8 m, a pole of 1 kg and 1 m on it. Joints have the names of
Isaac Lab's cartpole.
"""

from __future__ import annotations

from pathlib import Path

from pxr import Gf, Sdf, Usd, UsdGeom, UsdPhysics

RAIL_M = (8.0, 0.03, 0.03)
CART_M = (0.2, 0.25, 0.2)
POLE_M = (0.04, 0.06, 1.0)
"""Edges of the boxes of rail, cart and pole."""
HINGE_M = 0.12
"""Height of the pole's hinge above the middle of the cart."""
MASS_KG = 1.0
"""Mass of each of the three bodies."""
REACH_M = 4.0
"""Range of the cart to either side."""
SPEED = {"linear": 100.0, "angular": 5730.0}
"""Speed limits of joints, m/s and degrees/s."""


def write_cartpole(path: Path) -> Path:
    """Write the model to `path`, a .usda file."""
    stage = Usd.Stage.CreateNew(str(path))
    UsdGeom.SetStageUpAxis(stage, UsdGeom.Tokens.z)
    UsdGeom.SetStageMetersPerUnit(stage, 1.0)
    root = UsdGeom.Xform.Define(stage, "/cartpole").GetPrim()
    stage.SetDefaultPrim(root)
    UsdPhysics.ArticulationRootAPI.Apply(root)
    _box(stage, "rail", RAIL_M)
    _box(stage, "cart", CART_M)
    _box(stage, "pole", POLE_M, height_m=HINGE_M, centre_m=POLE_M[2] / 2.0)
    fixed = UsdPhysics.FixedJoint.Define(stage, "/cartpole/root_joint")
    fixed.CreateBody1Rel().SetTargets(["/cartpole/rail"])
    slider = UsdPhysics.PrismaticJoint.Define(stage, "/cartpole/slider_to_cart")
    slider.CreateLowerLimitAttr(-REACH_M)
    slider.CreateUpperLimitAttr(REACH_M)
    _connect(slider, "X", "rail", "cart", "linear")
    hinge = UsdPhysics.RevoluteJoint.Define(stage, "/cartpole/cart_to_pole")
    hinge.CreateLocalPos0Attr(Gf.Vec3f(0.0, 0.0, HINGE_M))
    _connect(hinge, "Y", "cart", "pole", "angular")
    stage.GetRootLayer().Save()
    return path


def _box(
    stage: Usd.Stage, name: str, size_m: tuple[float, float, float], height_m: float = 0.0, centre_m: float = 0.0
) -> None:
    """Add a body at `height_m` with a box of uniform density, whose centre is `centre_m` above it."""
    body = UsdGeom.Xform.Define(stage, f"/cartpole/{name}")
    body.AddTranslateOp().Set(Gf.Vec3d(0.0, 0.0, height_m))
    UsdPhysics.RigidBodyAPI.Apply(body.GetPrim())
    mass = UsdPhysics.MassAPI.Apply(body.GetPrim())
    mass.CreateMassAttr(MASS_KG)
    mass.CreateCenterOfMassAttr(Gf.Vec3f(0.0, 0.0, centre_m))
    x, y, z = (edge**2 * MASS_KG / 12.0 for edge in size_m)
    mass.CreateDiagonalInertiaAttr(Gf.Vec3f(y + z, x + z, x + y))
    mass.CreatePrincipalAxesAttr(Gf.Quatf(1.0))
    shape = UsdGeom.Cube.Define(stage, f"/cartpole/{name}/shape")
    shape.CreateSizeAttr(1.0)
    shape.AddTranslateOp().Set(Gf.Vec3d(0.0, 0.0, centre_m))
    shape.AddScaleOp().Set(Gf.Vec3f(*size_m))


def _connect(joint: UsdPhysics.Joint, axis: str, parent: str, child: str, kind: str) -> None:
    """Connect `child` to `parent` by `joint`, along or about `axis`, driven by forces only."""
    joint.CreateAxisAttr(axis)
    joint.CreateBody0Rel().SetTargets([f"/cartpole/{parent}"])
    joint.CreateBody1Rel().SetTargets([f"/cartpole/{child}"])
    limit = joint.GetPrim().CreateAttribute("physxJoint:maxJointVelocity", Sdf.ValueTypeNames.Float)
    limit.Set(SPEED[kind])
    drive = UsdPhysics.DriveAPI.Apply(joint.GetPrim(), kind)
    drive.CreateStiffnessAttr(0.0)
    drive.CreateDampingAttr(0.0)
