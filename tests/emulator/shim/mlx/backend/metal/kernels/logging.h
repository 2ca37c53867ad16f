// Stands in for MLX's logging.h, which needs Metal's os_log.
#pragma once
namespace mlx {
struct os_log {};
}
