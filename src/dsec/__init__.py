"""dsec: isolated, stateful places for AI agents to work in, on four substrates.

    import dsec

    with dsec.Sandbox.create("base") as sb:
        print(sb.exec("echo hello").stdout)

    Sandbox         a place to run commands in: create, connect, list; exec, start, session, pty, upload, download …
    ExecResult      what a command gave; Process, Session, Pty: commands, shells and terminals that last
    Files           files inside; Connection: a port inside
    Client          one service, by its address: create_many, environments, tokens, health
    Environment     what a sandbox starts from, put together by name
    errors          every error that a caller can act on; DsecError is the base of all

Each class with blocking methods has one with `Async` in front, for asyncio. `help(dsec.Sandbox)` says more.
Names are loaded when they are first used: importing this costs next to nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

if sys.version_info < (3, 11):  # noqa: UP036  pip would have said so; a checkout on PYTHONPATH does not
    raise ImportError(f"dsec needs Python 3.11 or newer, and this is {sys.version.split()[0]} at {sys.executable}")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dsec.core import errors as errors
    from dsec.core.errors import CommandError as CommandError
    from dsec.core.errors import DsecError as DsecError
    from dsec.core.spec import Environment as Environment
    from dsec.core.spec import Place as Place
    from dsec.core.spec import ReadyProbe as ReadyProbe
    from dsec.core.spec import VolumeMount as VolumeMount
    from dsec.sdk.calls import CallResult as CallResult
    from dsec.sdk.calls import make_call as make_call
    from dsec.sdk.client import AsyncClient as AsyncClient
    from dsec.sdk.client import AsyncCreated as AsyncCreated
    from dsec.sdk.environments import BASE_PACKAGES as BASE_PACKAGES
    from dsec.sdk.environments import AsyncEnvironments as AsyncEnvironments
    from dsec.sdk.files import AsyncFiles as AsyncFiles
    from dsec.sdk.files import AsyncWatch as AsyncWatch
    from dsec.sdk.grants import AsyncGrants as AsyncGrants
    from dsec.sdk.groups import AsyncGroup as AsyncGroup
    from dsec.sdk.groups import AsyncGroups as AsyncGroups
    from dsec.sdk.jobs import AsyncJob as AsyncJob
    from dsec.sdk.jobs import AsyncJobs as AsyncJobs
    from dsec.sdk.layers import AsyncLayers as AsyncLayers
    from dsec.sdk.machines import AsyncMachines as AsyncMachines
    from dsec.sdk.ports import AsyncConnection as AsyncConnection
    from dsec.sdk.process import AsyncProcess as AsyncProcess
    from dsec.sdk.projects import AsyncProjects as AsyncProjects
    from dsec.sdk.pty import AsyncPty as AsyncPty
    from dsec.sdk.reports import JobReport as JobReport
    from dsec.sdk.results import Chunk as Chunk
    from dsec.sdk.results import ExecResult as ExecResult
    from dsec.sdk.results import ExecUsage as ExecUsage
    from dsec.sdk.sandbox import AsyncSandbox as AsyncSandbox
    from dsec.sdk.screen import AsyncScreen as AsyncScreen
    from dsec.sdk.sessions import AsyncSession as AsyncSession
    from dsec.sdk.snapshots import AsyncSnapshot as AsyncSnapshot
    from dsec.sdk.snapshots import AsyncSnapshots as AsyncSnapshots
    from dsec.sdk.sync import Client as Client
    from dsec.sdk.sync import Connection as Connection
    from dsec.sdk.sync import Created as Created
    from dsec.sdk.sync import Environments as Environments
    from dsec.sdk.sync import Files as Files
    from dsec.sdk.sync import Grants as Grants
    from dsec.sdk.sync import Group as Group
    from dsec.sdk.sync import Groups as Groups
    from dsec.sdk.sync import Job as Job
    from dsec.sdk.sync import Jobs as Jobs
    from dsec.sdk.sync import Layers as Layers
    from dsec.sdk.sync import Machines as Machines
    from dsec.sdk.sync import Process as Process
    from dsec.sdk.sync import Projects as Projects
    from dsec.sdk.sync import Pty as Pty
    from dsec.sdk.sync import Sandbox as Sandbox
    from dsec.sdk.sync import Screen as Screen
    from dsec.sdk.sync import Session as Session
    from dsec.sdk.sync import Snapshot as Snapshot
    from dsec.sdk.sync import Snapshots as Snapshots
    from dsec.sdk.sync import Tokens as Tokens
    from dsec.sdk.sync import Volumes as Volumes
    from dsec.sdk.sync import Watch as Watch
    from dsec.sdk.sync import create_many as create_many
    from dsec.sdk.tokens import AsyncTokens as AsyncTokens
    from dsec.sdk.transfer import Transfer as Transfer
    from dsec.sdk.volumes import AsyncVolumes as AsyncVolumes
    from dsec.wire import records as _records
    from dsec.wire.calls import CallCase as CallCase
    from dsec.wire.calls import CallRequest as CallRequest
    from dsec.wire.calls import Checker as Checker
    from dsec.wire.collect import GcReport as GcReport
    from dsec.wire.environments import BuildEvent as BuildEvent
    from dsec.wire.environments import DebianSource as DebianSource
    from dsec.wire.environments import DirectorySource as DirectorySource
    from dsec.wire.environments import DockerArchiveSource as DockerArchiveSource
    from dsec.wire.environments import DockerfileSource as DockerfileSource
    from dsec.wire.environments import EnvironmentInfo as EnvironmentInfo
    from dsec.wire.environments import EnvironmentPart as EnvironmentPart
    from dsec.wire.environments import EnvironmentStats as EnvironmentStats
    from dsec.wire.environments import EnvironmentTrace as EnvironmentTrace
    from dsec.wire.environments import GitSource as GitSource
    from dsec.wire.environments import History as History
    from dsec.wire.environments import LayerUse as LayerUse
    from dsec.wire.environments import OciSource as OciSource
    from dsec.wire.environments import Ownership as Ownership
    from dsec.wire.environments import RegistrySource as RegistrySource
    from dsec.wire.environments import StoreSource as StoreSource
    from dsec.wire.environments import TarSource as TarSource
    from dsec.wire.groups import GroupInfo as GroupInfo
    from dsec.wire.groups import GroupLink as GroupLink
    from dsec.wire.groups import GroupStep as GroupStep
    from dsec.wire.iam import Caps as Caps
    from dsec.wire.iam import Policy as Policy
    from dsec.wire.iam import Quota as Quota
    from dsec.wire.images import ArchiveTarget as ArchiveTarget
    from dsec.wire.images import Compression as Compression
    from dsec.wire.images import ExportedImage as ExportedImage
    from dsec.wire.images import LayoutTarget as LayoutTarget
    from dsec.wire.images import RegistryTarget as RegistryTarget
    from dsec.wire.jobs import JobInfo as JobInfo
    from dsec.wire.layers import EnvironmentDiff as EnvironmentDiff
    from dsec.wire.layers import LayerInfo as LayerInfo
    from dsec.wire.machines import MachineInfo as MachineInfo
    from dsec.wire.records import ExecInfo as ExecInfo
    from dsec.wire.records import FileInfo as FileInfo
    from dsec.wire.records import Gap as Gap
    from dsec.wire.records import Metrics as Metrics
    from dsec.wire.records import SessionInfo as SessionInfo
    from dsec.wire.records import TtySize as TtySize
    from dsec.wire.records import WatchNotice as WatchNotice
    from dsec.wire.screens import ScreenSize as ScreenSize
    from dsec.wire.snapshots import Published as Published
    from dsec.wire.snapshots import SnapshotInfo as SnapshotInfo
    from dsec.wire.volumes import VolumeInfo as VolumeInfo

    SandboxInfo = _records.Sandbox

# Name → where it is, and what it is called there when that differs.
_NAMES: Final[dict[str, str]] = {
    "ArchiveTarget": "dsec.wire.images",
    "BASE_PACKAGES": "dsec.sdk.environments",
    "AsyncClient": "dsec.sdk.client",
    "AsyncConnection": "dsec.sdk.ports",
    "AsyncCreated": "dsec.sdk.client",
    "AsyncEnvironments": "dsec.sdk.environments",
    "AsyncGroup": "dsec.sdk.groups",
    "AsyncGroups": "dsec.sdk.groups",
    "AsyncJob": "dsec.sdk.jobs",
    "AsyncJobs": "dsec.sdk.jobs",
    "AsyncLayers": "dsec.sdk.layers",
    "AsyncFiles": "dsec.sdk.files",
    "AsyncProcess": "dsec.sdk.process",
    "AsyncPty": "dsec.sdk.pty",
    "AsyncSandbox": "dsec.sdk.sandbox",
    "AsyncSession": "dsec.sdk.sessions",
    "AsyncSnapshot": "dsec.sdk.snapshots",
    "AsyncSnapshots": "dsec.sdk.snapshots",
    "AsyncTokens": "dsec.sdk.tokens",
    "AsyncProjects": "dsec.sdk.projects",
    "AsyncGrants": "dsec.sdk.grants",
    "Projects": "dsec.sdk.sync",
    "Grants": "dsec.sdk.sync",
    "Quota": "dsec.wire.iam",
    "Caps": "dsec.wire.iam",
    "Policy": "dsec.wire.iam",
    "Place": "dsec.core.spec",
    "AsyncVolumes": "dsec.sdk.volumes",
    "AsyncMachines": "dsec.sdk.machines",
    "AsyncScreen": "dsec.sdk.screen",
    "AsyncWatch": "dsec.sdk.files",
    "BuildEvent": "dsec.wire.environments",
    "CallCase": "dsec.wire.calls",
    "CallRequest": "dsec.wire.calls",
    "CallResult": "dsec.sdk.calls",
    "Checker": "dsec.wire.calls",
    "Chunk": "dsec.sdk.results",
    "Client": "dsec.sdk.sync",
    "CommandError": "dsec.core.errors",
    "Compression": "dsec.wire.images",
    "Connection": "dsec.sdk.sync",
    "Created": "dsec.sdk.sync",
    "DebianSource": "dsec.wire.environments",
    "DirectorySource": "dsec.wire.environments",
    "DockerArchiveSource": "dsec.wire.environments",
    "DockerfileSource": "dsec.wire.environments",
    "DsecError": "dsec.core.errors",
    "Environment": "dsec.core.spec",
    "EnvironmentInfo": "dsec.wire.environments",
    "EnvironmentDiff": "dsec.wire.layers",
    "EnvironmentPart": "dsec.wire.environments",
    "EnvironmentStats": "dsec.wire.environments",
    "EnvironmentTrace": "dsec.wire.environments",
    "Environments": "dsec.sdk.sync",
    "ExecInfo": "dsec.wire.records",
    "ExecResult": "dsec.sdk.results",
    "ExecUsage": "dsec.sdk.results",
    "ExportedImage": "dsec.wire.images",
    "FileInfo": "dsec.wire.records",
    "Files": "dsec.sdk.sync",
    "Gap": "dsec.wire.records",
    "GcReport": "dsec.wire.collect",
    "GitSource": "dsec.wire.environments",
    "History": "dsec.wire.environments",
    "Group": "dsec.sdk.sync",
    "GroupInfo": "dsec.wire.groups",
    "GroupLink": "dsec.wire.groups",
    "GroupStep": "dsec.wire.groups",
    "Groups": "dsec.sdk.sync",
    "Job": "dsec.sdk.sync",
    "JobInfo": "dsec.wire.jobs",
    "JobReport": "dsec.sdk.reports",
    "Jobs": "dsec.sdk.sync",
    "LayerInfo": "dsec.wire.layers",
    "LayerUse": "dsec.wire.environments",
    "Layers": "dsec.sdk.sync",
    "LayoutTarget": "dsec.wire.images",
    "Machines": "dsec.sdk.sync",
    "Metrics": "dsec.wire.records",
    "OciSource": "dsec.wire.environments",
    "Ownership": "dsec.wire.environments",
    "Process": "dsec.sdk.sync",
    "Published": "dsec.wire.snapshots",
    "Pty": "dsec.sdk.sync",
    "ReadyProbe": "dsec.core.spec",
    "RegistrySource": "dsec.wire.environments",
    "RegistryTarget": "dsec.wire.images",
    "Sandbox": "dsec.sdk.sync",
    "SandboxInfo": "dsec.wire.records:Sandbox",
    "Snapshot": "dsec.sdk.sync",
    "SnapshotInfo": "dsec.wire.snapshots",
    "Snapshots": "dsec.sdk.sync",
    "Screen": "dsec.sdk.sync",
    "Session": "dsec.sdk.sync",
    "SessionInfo": "dsec.wire.records",
    "StoreSource": "dsec.wire.environments",
    "TarSource": "dsec.wire.environments",
    "Tokens": "dsec.sdk.sync",
    "Transfer": "dsec.sdk.transfer",
    "TtySize": "dsec.wire.records",
    "VolumeInfo": "dsec.wire.volumes",
    "MachineInfo": "dsec.wire.machines",
    "ScreenSize": "dsec.wire.screens",
    "VolumeMount": "dsec.core.spec",
    "Volumes": "dsec.sdk.sync",
    "Watch": "dsec.sdk.sync",
    "WatchNotice": "dsec.wire.records",
    "create_many": "dsec.sdk.sync",
    "make_call": "dsec.sdk.calls",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("dsec.errors")
    place = _NAMES.get(name)
    if place is None:
        raise AttributeError(f"module 'dsec' has no attribute {name!r}")
    module, _, there = place.partition(":")
    value = getattr(importlib.import_module(module), there or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, "errors"})
