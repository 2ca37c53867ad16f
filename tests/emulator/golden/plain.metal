// custom_kernel_plain_float_float
[[kernel]] void custom_kernel_plain_float_float(
  const device float* x [[buffer(0)]],
  device atomic<float>* total [[buffer(1)]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {
atomic_fetch_add_explicit(&total[0], x[thread_position_in_grid.x], memory_order_relaxed);
}
