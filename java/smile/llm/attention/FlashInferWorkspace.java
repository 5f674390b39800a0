package smile.llm.attention;

import java.lang.foreign.Arena;
import java.lang.foreign.FunctionDescriptor;
import java.lang.foreign.Linker;
import java.lang.foreign.MemoryLayout;
import java.lang.foreign.MemoryLayout.PathElement;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.StructLayout;
import java.lang.foreign.SymbolLookup;
import java.lang.foreign.ValueLayout;
import java.lang.invoke.MethodHandle;

/**
 * The workspace of one device or tensor-parallel rank: scratch memory, plans and plan caches of paged attention.
 *
 * <p>This class creates, invalidates and closes a native workspace. Attention itself is called through the C ABI: pass
 * {@link #handle()} to downcalls of {@code fiw_decode}, {@code fiw_prefill}, {@code fiw_verify} and the others that
 * {@code fiw.h} describes.
 *
 * <pre>{@code
 * try (FlashInferWorkspace workspace = FlashInferWorkspace.create(-1, 0)) {
 *   if (workspace == null) return attendWithout();  // no library, or no backend for the device
 *   for (Layer layer : layers) decode(workspace.handle(), layer);  // the first layer plans, the others find its plan
 * }
 * }</pre>
 *
 * <p>The native library is {@code libfiw.so.0} on the loader's path, or the file that the system property {@code
 * fiw.library} names. Needs Java 22 or newer, and {@code --enable-native-access} for the module that holds this class.
 *
 * <p>The methods of this class may be called from any thread, and a handle may move between threads. Attention calls on
 * one workspace take one thread at a time: a second one gets {@code FIW_BUSY} and changes nothing.
 */
public final class FlashInferWorkspace implements AutoCloseable {
  private final Native library;
  private MemorySegment handle;

  private FlashInferWorkspace(Native library, MemorySegment handle) {
    this.library = library;
    this.handle = handle;
  }

  /**
   * Creates a workspace. It holds native memory until {@link #close()}.
   *
   * @param deviceIndex the CUDA device, or -1 for the CPU
   * @param workspaceBytes a hint for the size of the float scratch, which grows when it must; 0 for the default
   * @return the workspace, or null when it is unavailable: the library has no backend for the device, or there is no
   *     library and {@code fiw.library} names none
   * @throws IllegalArgumentException if {@code workspaceBytes} is negative, or {@code fiw.library} names what is no
   *     library
   * @throws IllegalStateException if the device does not exist, memory is short, or the library's ABI is another; the
   *     message starts with the status, as {@code fiw_status_name} has it
   */
  public static FlashInferWorkspace create(int deviceIndex, long workspaceBytes) {
    if (workspaceBytes < 0) {
      throw new IllegalArgumentException("workspaceBytes is " + workspaceBytes + ", expected at least 0");
    }
    Native library = Native.load();
    if (library == null) {
      return null;
    }
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment error = Native.newError(arena);
      MemorySegment out = arena.allocate(ValueLayout.ADDRESS);
      int status = (int) Native.call(library.create, deviceIndex, workspaceBytes, out, error);
      if (status == Native.UNAVAILABLE) {
        return null;
      }
      library.check(status, error);
      return new FlashInferWorkspace(library, out.get(ValueLayout.ADDRESS, 0));
    }
  }

  /**
   * The native handle, a {@code fiw_workspace*}, for downcalls of the C ABI. It is borrowed: never free it.
   *
   * @return the handle, good until {@link #close()}; {@link MemorySegment#NULL} afterwards, which every call of the C
   *     ABI refuses
   */
  public synchronized MemorySegment handle() {
    return handle;
  }

  /**
   * Frees everything that the workspace holds. A second call does nothing. No other thread may be in a call with the
   * handle.
   */
  @Override
  public synchronized void close() {
    if (!handle.equals(MemorySegment.NULL)) {
      Native.call(library.free, handle);
      handle = MemorySegment.NULL;
    }
  }

  /**
   * Drops decode and prefill plans, on CUDA with the K and V gathered for prefills; verify plans stay. Like the two
   * methods below, this is for callers who want memory back or a clean slate, never needed for right results. Does
   * nothing after {@link #close()}.
   *
   * @throws IllegalStateException if another thread is in a call on this workspace
   */
  public void invalidateRuntimeCache() {
    invalidate(library.invalidateRuntime);
  }

  /**
   * Drops prefill plans, and what was gathered for them, only. Does nothing after {@link #close()}.
   *
   * @throws IllegalStateException if another thread is in a call on this workspace
   */
  public void invalidatePrefillRuntimeCache() {
    invalidate(library.invalidatePrefill);
  }

  /**
   * Drops verify plans only. Does nothing after {@link #close()}.
   *
   * @throws IllegalStateException if another thread is in a call on this workspace
   */
  public void invalidateVerifyRuntimeCache() {
    invalidate(library.invalidateVerify);
  }

  private synchronized void invalidate(MethodHandle scope) {
    try (Arena arena = Arena.ofConfined()) {
      MemorySegment error = Native.newError(arena);
      library.check((int) Native.call(scope, handle, error), error);  // on a null handle without effect
    }
  }

  // The functions of the C ABI that this class calls, from a library that is loaded once and stays.
  private static final class Native {
    static final int UNAVAILABLE = 40;
    private static final int OK = 0;
    private static final int ABI_VERSION = 1;

    // fiw_error
    private static final StructLayout ERROR =
        MemoryLayout.structLayout(
            ValueLayout.JAVA_LONG.withName("struct_size"),
            ValueLayout.JAVA_INT.withName("code"),
            ValueLayout.JAVA_INT.withName("reason"),
            ValueLayout.JAVA_INT.withName("backend_code"),
            ValueLayout.JAVA_INT.withName("reserved"),
            ValueLayout.JAVA_LONG.withName("index"),
            ValueLayout.JAVA_LONG.withName("bytes_required"),
            MemoryLayout.sequenceLayout(256, ValueLayout.JAVA_BYTE).withName("message"));

    private static Native loaded;

    final MethodHandle create;
    final MethodHandle free;
    final MethodHandle invalidateRuntime;
    final MethodHandle invalidatePrefill;
    final MethodHandle invalidateVerify;
    private final MethodHandle statusName;

    private Native(SymbolLookup symbols) {
      statusName = function(symbols, "fiw_status_name", FunctionDescriptor.of(
          ValueLayout.ADDRESS.withTargetLayout(MemoryLayout.sequenceLayout(64, ValueLayout.JAVA_BYTE)),
          ValueLayout.JAVA_INT));
      create = function(symbols, "fiw_workspace_create", FunctionDescriptor.of(ValueLayout.JAVA_INT,
          ValueLayout.JAVA_INT, ValueLayout.JAVA_LONG, ValueLayout.ADDRESS, ValueLayout.ADDRESS));
      free = function(symbols, "fiw_workspace_free", FunctionDescriptor.ofVoid(ValueLayout.ADDRESS));
      FunctionDescriptor invalidate =
          FunctionDescriptor.of(ValueLayout.JAVA_INT, ValueLayout.ADDRESS, ValueLayout.ADDRESS);
      invalidateRuntime = function(symbols, "fiw_workspace_invalidate_runtime_cache", invalidate);
      invalidatePrefill = function(symbols, "fiw_workspace_invalidate_prefill_runtime_cache", invalidate);
      invalidateVerify = function(symbols, "fiw_workspace_invalidate_verify_runtime_cache", invalidate);

      MethodHandle checkAbi = function(symbols, "fiw_check_abi",
          FunctionDescriptor.of(ValueLayout.JAVA_INT, ValueLayout.JAVA_INT, ValueLayout.ADDRESS));
      try (Arena arena = Arena.ofConfined()) {
        MemorySegment error = newError(arena);
        check((int) call(checkAbi, ABI_VERSION, error), error);
      }
    }

    // Null when there is none.
    static synchronized Native load() {
      if (loaded == null) {
        String file = System.getProperty("fiw.library");
        SymbolLookup symbols;
        try {
          symbols = SymbolLookup.libraryLookup(file != null ? file : "libfiw.so.0", Arena.global());
        } catch (IllegalArgumentException e) {
          if (file == null) {
            return null;
          }
          throw new IllegalArgumentException("fiw.library is " + file + ", expected a library that loads", e);
        }
        loaded = new Native(symbols);
      }
      return loaded;
    }

    static MemorySegment newError(Arena arena) {
      MemorySegment error = arena.allocate(ERROR);
      error.set(ValueLayout.JAVA_LONG, 0, ERROR.byteSize());
      return error;
    }

    void check(int status, MemorySegment error) {
      if (status == OK) {
        return;
      }
      String name = ((MemorySegment) call(statusName, status)).getString(0);
      String message = error.getString(ERROR.byteOffset(PathElement.groupElement("message")));
      throw new IllegalStateException(name + ": " + message);
    }

    static Object call(MethodHandle function, Object... arguments) {
      try {
        return function.invokeWithArguments(arguments);
      } catch (Throwable e) {
        throw new AssertionError("a downcall throws nothing of its own", e);
      }
    }

    private static MethodHandle function(SymbolLookup symbols, String name, FunctionDescriptor type) {
      MemorySegment symbol =
          symbols.find(name).orElseThrow(() -> new IllegalStateException("the library has no function " + name));
      return Linker.nativeLinker().downcallHandle(symbol, type);
    }
  }
}
