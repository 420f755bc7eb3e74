"""Has the GPU store to an address that is nobody's, by the driver's own API: what a program's bug does.

Needs libcuda alone. Exit code 0: the driver called it illegal; 1: something else, which is printed.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

ILLEGAL_ADDRESS = 700
KERNEL = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry poke(.param .u64 where)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [where];
    mov.u32 %r1, 7;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""


def must(name: str, *arguments: Any) -> None:
    """Call the driver; end the program where it refuses."""
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name} gave {code}")


cuda = ctypes.CDLL("libcuda.so.1")
device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
must("cuInit", 0)
must("cuDeviceGet", ctypes.byref(device), 0)
must("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
must("cuCtxSetCurrent", context)
must("cuModuleLoadData", ctypes.byref(module), KERNEL)
must("cuModuleGetFunction", ctypes.byref(function), module, b"poke")
where = ctypes.c_uint64(0x10)
arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(where), ctypes.c_void_p))
must("cuLaunchKernel", function, *[ctypes.c_uint(1)] * 6, ctypes.c_uint(0), None, arguments, None)
code = cuda.cuCtxSynchronize()
sys.exit(0 if code == ILLEGAL_ADDRESS else f"cuCtxSynchronize gave {code}, expected {ILLEGAL_ADDRESS}")
