// Marks what a planning kernel on the device computes with as well as the planners on the host.
#pragma once

#ifdef __CUDACC__
#define FIW_HOST_DEVICE __host__ __device__
#else
#define FIW_HOST_DEVICE
#endif
