// Stands in for MLX's bf16_math.h: bfloat overloads are part of msl/math.h here.
#pragma once
