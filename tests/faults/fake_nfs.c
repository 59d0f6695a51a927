/* A library to preload: calls on files below FAKE_NFS_ROOT fail as on a network file system that is in trouble.
 *
 * FAKE_NFS_LOSE=n   every n-th rename and every n-th link is done, and then fails: its reply was lost, the client sent
 *                   the request again, and the server answers ENOENT or EEXIST.
 * FAKE_NFS_STALE=n  every n-th open, and every n-th rename and link that is not lost, fails with ESTALE, undone.
 * FAKE_NFS_FULL=n   every n-th open fails with EMFILE.
 * FAKE_NFS_LOG      a file that gets one letter for each such failure: r, l, s, m.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { RENAMES, LINKS, OPENS, MOVES, FULL, COUNTERS };
static int counters[COUNTERS];

static int is_ours(const char *path) {
    const char *root = getenv("FAKE_NFS_ROOT");
    return root && path && strncmp(path, root, strlen(root)) == 0;
}

static int is_due(int counter, const char *variable) {
    const char *every = getenv(variable);
    int n = every ? atoi(every) : 0;
    return n > 0 && __atomic_add_fetch(&counters[counter], 1, __ATOMIC_SEQ_CST) % n == 0;
}

static int fail(int number, char letter) {
    const char *log = getenv("FAKE_NFS_LOG");
    if (log) {
        int handle = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0666);
        if (handle >= 0) {
            if (write(handle, &letter, 1) < 0) {}
            close(handle);
        }
    }
    errno = number;
    return -1;
}

typedef int (*two_paths)(const char *, const char *);

static int move(const char *name, const char *from, const char *to, int counter, int answer, char letter) {
    two_paths real = (two_paths)dlsym(RTLD_NEXT, name);
    if (!is_ours(to)) return real(from, to);
    if (is_due(counter, "FAKE_NFS_LOSE")) return real(from, to) ? -1 : fail(answer, letter);
    if (is_due(MOVES, "FAKE_NFS_STALE")) return fail(ESTALE, 's');
    return real(from, to);
}

int rename(const char *from, const char *to) { return move("rename", from, to, RENAMES, ENOENT, 'r'); }
int link(const char *from, const char *to) { return move("link", from, to, LINKS, EEXIST, 'l'); }

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name);                \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        int mode = flags & O_CREAT ? va_arg(rest, int) : 0;                                                            \
        va_end(rest);                                                                                                  \
        if (is_ours(path) && is_due(FULL, "FAKE_NFS_FULL")) return fail(EMFILE, 'm');                                  \
        if (is_ours(path) && is_due(OPENS, "FAKE_NFS_STALE")) return fail(ESTALE, 's');                                \
        return real(path, flags, mode);                                                                                \
    }
OPEN(open)
OPEN(open64)
