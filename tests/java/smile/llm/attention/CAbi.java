package smile.llm.attention;

import java.lang.foreign.AddressLayout;
import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SymbolLookup;
import java.lang.foreign.ValueLayout;
import java.util.Arrays;

/** As much of the C ABI as the tests call: {@code fiw.h} in downcalls whose types follow from their arguments. */
final class CAbi {
  static final int OK = 0;
  static final int INVALID_ARGUMENT = 10;
  static final int CUDA = 1;

  // Cache scopes, in the order of fiw_workspace_stats.
  static final int DECODE = 0;
  static final int PREFILL = 1;
  static final int VERIFY = 2;

  private static final AddressLayout POINTER = ValueLayout.ADDRESS;
  private static final Linker LINKER = Linker.nativeLinker();
  private static final SymbolLookup LIBRARY =
      SymbolLookup.libraryLookup(System.getProperty("fiw.library"), Arena.global());

  private CAbi() {}

  /** Calls a function that returns a status or a boolean. */
  static int call(String function, Object... arguments) {
    return (int) invoke(function, ValueLayout.JAVA_INT, arguments);
  }

  private static Object invoke(String function, MemoryLayout result, Object... arguments) {
    MemoryLayout[] types = Arrays.stream(arguments).map(CAbi::type).toArray(MemoryLayout[]::new);
    FunctionDescriptor descriptor =
        result != null ? FunctionDescriptor.of(result, types) : FunctionDescriptor.ofVoid(types);
    try {
      MemorySegment symbol = LIBRARY.find(function).orElseThrow();
      return LINKER.downcallHandle(symbol, descriptor).invokeWithArguments(arguments);
    } catch (Throwable e) {
      throw new AssertionError(function, e);
    }
  }

  private static MemoryLayout type(Object argument) {
    return argument instanceof Integer ? ValueLayout.JAVA_INT
        : argument instanceof Long ? ValueLayout.JAVA_LONG
        : POINTER;
  }

  /** A sized struct that its init function has set up: fiw_NAME_init(struct, size). */
  static MemorySegment struct(Arena arena, String name, long bytes) {
    MemorySegment struct = arena.allocate(bytes, 8);
    invoke("fiw_" + name + "_init", null, struct, bytes);
    return struct;
  }

  static MemorySegment newError(Arena arena) {
    return struct(arena, "error", 296);
  }

  static String message(MemorySegment error) {
    return error.getString(40);
  }

  static MemorySegment newParams(Arena arena, int heads, int kvHeads, int dim) {
    MemorySegment params = struct(arena, "attention_params", 40);
    params.set(ValueLayout.JAVA_INT, 8, heads);
    params.set(ValueLayout.JAVA_INT, 12, kvHeads);
    params.set(ValueLayout.JAVA_INT, 16, dim);
    return params;
  }

  static MemorySegment newKvCache(Arena arena, MemorySegment k, MemorySegment v) {
    MemorySegment cache = struct(arena, "kv_cache", 64);
    cache.set(POINTER, 8, k);
    cache.set(POINTER, 16, v);
    return cache;
  }

  static MemorySegment newPageTable(Arena arena, int pageSize, long numPages, int[] pages, int[] counts, int[] lens) {
    MemorySegment error = newError(arena);
    MemorySegment out = arena.allocate(POINTER);
    int status = call("fiw_page_table_from_pages", pageSize, numPages, ints(arena, pages), ints(arena, counts),
        ints(arena, lens), out, error);
    FlashInferWorkspaceTest.expect(status == OK, message(error));
    return out.get(POINTER, 0).reinterpret(arena, table -> invoke("fiw_page_table_free", null, table));
  }

  /** Counters of one scope. */
  record Plans(long found, long made, long held) {}

  static Plans plans(Arena arena, MemorySegment workspace, int scope) {
    MemorySegment error = newError(arena);
    MemorySegment stats = struct(arena, "workspace_stats", 208);
    FlashInferWorkspaceTest.expect(
        call("fiw_workspace_get_stats", workspace, stats, error) == OK, message(error));
    long at = 8 + 48L * scope;
    return new Plans(
        stats.get(ValueLayout.JAVA_LONG, at),
        stats.get(ValueLayout.JAVA_LONG, at + 8),
        stats.get(ValueLayout.JAVA_LONG, at + 32));
  }

  static MemorySegment floats(Arena arena, float[] data, long... shape) {
    return tensor(arena, arena.allocateFrom(ValueLayout.JAVA_FLOAT, data), 2, shape);
  }

  static MemorySegment ints(Arena arena, int... data) {
    return tensor(arena, arena.allocateFrom(ValueLayout.JAVA_INT, data), 0, data.length);
  }

  /** A compact DLTensor on the CPU of 32-bit elements: type code 2 for floats, 0 for integers. */
  static MemorySegment tensor(Arena arena, MemorySegment data, int typeCode, long... shape) {
    MemorySegment tensor = arena.allocate(48, 8);  // strides and byte_offset stay 0
    tensor.set(POINTER, 0, data);
    tensor.set(ValueLayout.JAVA_INT, 8, 1);  // kDLCPU
    tensor.set(ValueLayout.JAVA_INT, 16, shape.length);
    tensor.set(ValueLayout.JAVA_BYTE, 20, (byte) typeCode);
    tensor.set(ValueLayout.JAVA_BYTE, 21, (byte) 32);
    tensor.set(ValueLayout.JAVA_SHORT, 22, (short) 1);
    tensor.set(POINTER, 24, arena.allocateFrom(ValueLayout.JAVA_LONG, shape));
    return tensor;
  }
}
