"""The CUDA driver as the package uses it: facts of a GPU, launches, clearing memory, graphs of launches.

The driver's structures and calls come from cuda-bindings, only the plain launch from CuPy. Neither is imported before a
GPU is used.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol

from ..bridges import INSTALL, require_cupy

# A function that launches a kernel: stream, x, y and z of the grid, bytes of the parameters, CTAs of a cluster.
Submit = Callable[[int, int, int, int, bytes, int], None]

# CTAs of the largest cluster: on every GPU that has clusters; on Hopper, for kernels that opt in.
PORTABLE_CLUSTER, MAX_CLUSTER = 8, 16
_OVERLAP_DRIVER = 12030  # the first driver whose graphs may have overlapping launches: CUDA 12.3


class Launchable(Protocol):
    """What this module needs of a `kernel.Kernel`. `kernel.py` imports this module, so it cannot be named here."""

    max_cluster: int
    overlaps: bool

    def load(self, device: int) -> Any: ...
    def __hash__(self) -> int: ...


@lru_cache(maxsize=1)
def api() -> Any:
    """NVIDIA's own Python driver API.

    Raises:
        RuntimeError: it is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(f"a CUDA array needs cuda-bindings: {INSTALL}") from error
    return driver


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver. Returns its results without the status.

    Raises:
        RuntimeError: the status is an error.
    """
    status, *results = getattr(api(), name)(*arguments)
    if status:
        raise error(name, status)
    return results[0] if len(results) == 1 else results


def error(name: str, status: int, of: str = "") -> RuntimeError:
    """The error to raise where a function of the driver did not return success."""
    return RuntimeError(f"{name} failed: CUDA driver error {int(status)}{of}")


@lru_cache(maxsize=1)
def runtime() -> Any:
    """CuPy's CUDA runtime."""
    return require_cupy("a CUDA array").cuda.runtime


def clear(address: int, nbytes: int, stream: int) -> None:
    """Set memory to zero bytes, in order on a stream."""
    runtime().memsetAsync(address, 0, nbytes, stream)


def allocate(nbytes: int) -> int | None:
    """Allocate memory of the current GPU outside of all pools. Returns its address; None: the driver has none left."""
    with relaxed_capture():
        status, address = api().cuMemAlloc(nbytes)
    if status == api().CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        return None
    if status:
        raise error("cuMemAlloc", status)
    return int(address)


class _Threads(threading.local):
    """State of each thread."""

    def current_device(self) -> int:
        """The number of the thread's current GPU.

        The first call also makes the CUDA context, which a launch by the driver does not. After it the runtime's own
        function stands under this name, which takes less time.
        """
        cuda = runtime()
        cuda.setDevice(cuda.getDevice())
        self.current_device = cuda.getDevice  # type: ignore[method-assign]
        return cuda.getDevice()


THREAD = _Threads()


# --- facts of a GPU -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # there is one object for each GPU; comparing by identity is faster
class Gpu:
    """What launchers need to know about a GPU.

    Attributes:
        device: its number.
        sms: streaming multiprocessors.
        capability: 10 times its compute capability: 90 for Hopper.
        shared_kb: KB of shared memory that a CTA may have.
        name: the driver's name, e.g. "NVIDIA H200".
    """

    device: int
    sms: int
    capability: int
    shared_kb: int
    name: str = ""

    @property
    def more_than_half(self) -> int:
        """Bytes of shared memory of a CTA with which no second one fits an SM (which has 1 KB more than a CTA may
        have)."""
        return (self.shared_kb // 2 + 1) * 1024

    def clusters_at_once(self, kernel: Launchable) -> tuple[int, ...]:
        """How many clusters of 1, 2, ... `kernel.max_cluster` CTAs run at a time.

        A cluster runs within a GPC, and some GPCs have fewer SMs than others. So there may be fewer clusters than SMs
        divided by CTAs of a cluster.
        """
        return clusters_at_once(kernel, self.device)


@cache
def gpu(device: int) -> Gpu:
    """The facts of a GPU."""
    properties = runtime().getDeviceProperties(device)
    capability = 10 * properties["major"] + properties["minor"]
    shared_kb, name = properties["sharedMemPerBlockOptin"] // 1024, properties["name"]
    return Gpu(device, properties["multiProcessorCount"], capability, shared_kb, name.decode())


@lru_cache(maxsize=1)
def driver_version() -> int:
    """The CUDA version that the driver supports, e.g. 12030 for 12.3."""
    return runtime().driverGetVersion()


@cache
def clusters_at_once(kernel: Launchable, device: int) -> tuple[int, ...]:
    """See `Gpu.clusters_at_once`."""
    THREAD.current_device()
    loaded = kernel.load(device)
    counts = []
    with require_cupy("a CUDA array").cuda.Device(device):  # the driver answers for the current context
        for cluster in range(1, kernel.max_cluster + 1):
            config = launch_config(loaded.threads, loaded.shared_bytes, [cluster_attribute(cluster)])
            config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
            counts.append(call("cuOccupancyMaxActiveClusters", loaded.handle, config))
    return tuple(counts)


# --- launches -------------------------------------------------------------------------------------------------


def overlaps(kernel: Launchable, device: int) -> bool:
    """Whether a kernel's CTAs may start while the launch before still runs (programmatic dependent launch)."""
    return kernel.overlaps and gpu(device).capability >= 90 and driver_version() >= _OVERLAP_DRIVER


def plain_submitter(handle: int, threads: int, shared_bytes: int) -> Submit:
    """A function that launches without attributes on a stream of the current device. The driver copies the
    parameters."""
    from cupy.cuda import driver

    launch, as_pointer, address = driver.launchKernel, ctypes.c_char_p, ctypes.addressof

    def submit(stream: int, x: int, y: int, z: int, params: bytes, cluster: int) -> None:
        pointer = as_pointer(params)
        launch(handle, x, y, z, threads, 1, 1, shared_bytes, stream, address(pointer), 0)

    return submit


def attribute_submitter(handle: int, threads: int, shared_bytes: int, overlapping: bool) -> Submit:
    """A function that launches with attributes: clusters, and overlap with the launch before."""
    launch, as_pointer, address = api().cuLaunchKernelEx, ctypes.c_char_p, ctypes.addressof
    function, configs = api().CUfunction(handle), _Configs(threads, shared_bytes, overlapping)

    def submit(stream: int, x: int, y: int, z: int, params: bytes, cluster: int) -> None:
        config, given = configs.known.get(cluster) or configs.make(cluster)
        now = (stream, x, y, z)
        if now != given:
            if stream != given[0]:  # setting it takes longer than setting the grid
                config.hStream = stream
            config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
            configs.known[cluster] = config, now
        pointer = as_pointer(params)
        (status,) = launch(config, function, address(pointer), 0)
        if status:
            raise error("cuLaunchKernelEx", status, f" (grid {(x, y, z)})")

    return submit


class _Configs(threading.local):
    """A thread's CUlaunchConfigs of a kernel.

    Attributes:
        known: by the CTAs of a cluster: a configuration, and its stream and grid.
    """

    def __init__(self, threads: int, shared_bytes: int, overlapping: bool) -> None:
        self._make = lambda attributes: launch_config(threads, shared_bytes, attributes)
        self._overlapping = overlapping
        self.known: dict[int, tuple[Any, tuple[int | None, int, int, int]]] = {}

    def make(self, cluster: int) -> tuple[Any, tuple[int | None, int, int, int]]:
        """A new configuration, whose stream and grid are not set."""
        attributes = [cluster_attribute(cluster)] if cluster > 1 else []
        return self._make(attributes + [overlap_attribute()] * self._overlapping), (None, 0, 0, 0)


def launch_config(threads: int, shared_bytes: int, attributes: list[Any]) -> Any:
    """A CUlaunchConfig without its grid and stream."""
    config = api().CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def cluster_attribute(cluster: int) -> Any:
    """The attribute: so many CTAs along x form a cluster."""
    attribute = api().CUlaunchAttribute()
    attribute.id = api().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
    return attribute


def overlap_attribute() -> Any:
    """The attribute: the launch may overlap with the one before."""
    attribute = api().CUlaunchAttribute()
    attribute.id = api().CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


# --- captures -------------------------------------------------------------------------------------------------


def capture_of(stream: int) -> int:
    """The number of the capture of a stream, which is unique in the process."""
    return int(call("cuStreamGetCaptureInfo", stream)[1])


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread allocate, free and copy memory while other threads capture."""
    mode = call("cuThreadExchangeStreamCaptureMode", api().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", mode)
