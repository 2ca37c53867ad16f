// Vector types, and `msl_make`, the function behind constructors such as float4(v.xy, 0, 1).
#pragma once

#define MSL_VECTORS(T)                                     \
  typedef T T##2 __attribute__((ext_vector_type(2)));      \
  typedef T T##3 __attribute__((ext_vector_type(3)));      \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(float)
MSL_VECTORS(bfloat)

// Packed vectors are aligned like their elements.  The packed_*3 types (12 bytes) have no clang equivalent.
#define MSL_PACKED(T)                                                                     \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T))));        \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
MSL_PACKED(char)
MSL_PACKED(uchar)
MSL_PACKED(short)
MSL_PACKED(ushort)
MSL_PACKED(int)
MSL_PACKED(uint)
MSL_PACKED(half)
MSL_PACKED(float)

// The element type and length of a vector; a scalar is a vector of length 1.
template <class V>
struct msl_shape {
  static constexpr int length = 1;
  typedef V element;
};
#define MSL_SHAPE(N)                                              \
  template <class T>                                              \
  struct msl_shape<T __attribute__((ext_vector_type(N)))> {       \
    static constexpr int length = N;                              \
    typedef T element;                                            \
  };
MSL_SHAPE(2)
MSL_SHAPE(3)
MSL_SHAPE(4)

template <class V, int N>
struct msl_append {
  template <class A>
  static MSL_INLINE void to(V& v, int& at, A a) {
    for (int k = 0; k < N; k++) v[at++] = (typename msl_shape<V>::element)a[k];
  }
};
template <class V>
struct msl_append<V, 1> {
  template <class A>
  static MSL_INLINE void to(V& v, int& at, A a) {
    v[at++] = (typename msl_shape<V>::element)a;
  }
};

template <int... N>
struct msl_sum {
  static constexpr int value = 0;
};
template <int A, int... N>
struct msl_sum<A, N...> {
  static constexpr int value = A + msl_sum<N...>::value;
};

template <class V, bool one_scalar>
struct msl_maker {
  template <class... A>
  static MSL_INLINE V from(A... a) {
    static_assert(msl_sum<msl_shape<A>::length...>::value == msl_shape<V>::length,
                  "a vector constructor needs as many components as the vector has");
    V v;
    int at = 0;
    int in_order[] = {(msl_append<V, msl_shape<A>::length>::to(v, at, a), 0)...};
    (void)in_order;
    return v;
  }
};
template <class V>
struct msl_maker<V, true> {
  template <class A>
  static MSL_INLINE V from(A a) {
    return (V)((typename msl_shape<V>::element)a);
  }
};

template <class V>
MSL_INLINE V msl_make() {
  return (V)((typename msl_shape<V>::element)0);
}
template <class V, class First, class... Rest>
MSL_INLINE V msl_make(First first, Rest... rest) {
  return msl_maker<V, sizeof...(Rest) == 0 && msl_shape<First>::length == 1>::from(first, rest...);
}
