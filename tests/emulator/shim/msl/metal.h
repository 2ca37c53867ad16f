// Metal Shading Language on clang: the language words, the types, and the part of Metal's standard
// library that compute kernels use.  A kernel that compiles here is C++ whose address spaces are real
// clang address spaces (type-checked) that lower to flat memory (so that accesses can be watched).
#pragma once
#define __METAL_VERSION__ 310

#include <msl/abi.h>
#include <msl/language.h>
#include <msl/vectors.h>
#include <msl/traits.h>
#include <msl/math.h>
#include <msl/sync.h>
#include <msl/simdgroup.h>
#include <msl/atomics.h>
#include <msl/matrix.h>
#include <msl/constructors.h>
