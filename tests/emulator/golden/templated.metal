// custom_kernel_templated__float_5_1_float_bfloat16_tc_int32_ts_float16_ts_float_uint32_t
// the header
inline float helper(float v) { return v; }
template <typename T, int N, bool B>
[[kernel]] void custom_kernel_templated__float_5_1_float_bfloat16_tc_int32_ts_float16_ts_float_uint32_t(
  const device float* table [[buffer(0)]],
  const constant int* table_shape [[buffer(1)]],
  const constant int64_t* table_strides [[buffer(2)]],
  const constant int& table_ndim [[buffer(3)]],
  const constant bfloat16_t* small [[buffer(4)]],
  const constant int32_t& number [[buffer(5)]],
  const constant float16_t& half_number [[buffer(6)]],
  device float* out [[buffer(7)]],
  device uint32_t* count [[buffer(8)]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_grid [[thread_position_in_grid]],
  uint threads_per_simdgroup [[threads_per_simdgroup]]) {

    uint i = thread_position_in_grid.x;
    out[i] = T(table[i % uint(table_shape[0])]) + T(small[0]) + T(number) + T(half_number) + T(N);
    count[i] = uint(table_strides[0]) + uint(table_ndim) + thread_index_in_simdgroup + threads_per_simdgroup;

}

template [[host_name("custom_kernel_templated__float_5_1_float_bfloat16_tc_int32_ts_float16_ts_float_uint32_t")]] [[kernel]] decltype(custom_kernel_templated__float_5_1_float_bfloat16_tc_int32_ts_float16_ts_float_uint32_t<float, 5, 1>) custom_kernel_templated__float_5_1_float_bfloat16_tc_int32_ts_float16_ts_float_uint32_t<float, 5, 1>;
