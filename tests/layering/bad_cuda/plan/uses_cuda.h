// A file that breaks the rule on purpose: planners must not know CUDA. Never compiled.
#pragma once
#include <cuda_runtime.h>
