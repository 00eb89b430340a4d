/* Preloaded library: records, in order, what a process does to the files of one folder, so a test
 * can derive the states that a power loss may leave. DISK_FOLDER: the folder. DISK_RECORD: the file
 * of records: kind, path length, offset, length, path, bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static int out = -1;
static const char *folder;

__attribute__((constructor)) static void start(void) {
    folder = getenv("DISK_FOLDER");
    const char *record = getenv("DISK_RECORD");
    if (folder && record)
        out = (int)syscall(SYS_openat, AT_FDCWD, record, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

static void all(const void *data, size_t length) {
    while (length > 0) {
        ssize_t written = syscall(SYS_write, out, data, length);
        if (written <= 0)
            abort();
        data = (const char *)data + written;
        length -= (size_t)written;
    }
}

static void note(const char *path, char kind, int64_t offset, const void *data, size_t length) {
    if (out < 0 || strncmp(path, folder, strlen(folder)) != 0)
        return;
    uint16_t path_length = (uint16_t)strlen(path);
    uint64_t data_length = length;
    pthread_mutex_lock(&turn);
    all(&kind, 1);
    all(&path_length, sizeof path_length);
    all(&offset, sizeof offset);
    all(&data_length, sizeof data_length);
    all(path, path_length);
    all(data, length);
    pthread_mutex_unlock(&turn);
}

static void note_fd(int fd, char kind, int64_t offset, const void *data, size_t length) {
    char link[64], path[4096];
    if (out < 0 || fd == out)
        return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t end = readlink(link, path, sizeof path - 1);
    if (end <= 0)
        return;
    path[end] = 0;
    note(path, kind, offset, data, length);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t length) {
    off_t at = lseek(fd, 0, SEEK_CUR);
    ssize_t written = REAL(write)(fd, data, length);
    if (written > 0 && at >= 0)
        note_fd(fd, 'w', at, data, (size_t)written);
    return written;
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t at) {
    ssize_t written = REAL(pwrite)(fd, data, length, at);
    if (written > 0)
        note_fd(fd, 'w', at, data, (size_t)written);
    return written;
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t at) {
    ssize_t written = REAL(pwrite64)(fd, data, length, at);
    if (written > 0)
        note_fd(fd, 'w', at, data, (size_t)written);
    return written;
}

int ftruncate(int fd, off_t length) {
    int done = REAL(ftruncate)(fd, length);
    if (done == 0)
        note_fd(fd, 't', length, "", 0);
    return done;
}

int ftruncate64(int fd, off64_t length) {
    int done = REAL(ftruncate64)(fd, length);
    if (done == 0)
        note_fd(fd, 't', length, "", 0);
    return done;
}

int fsync(int fd) {
    int done = REAL(fsync)(fd);
    if (done == 0)
        note_fd(fd, 's', 0, "", 0);
    return done;
}

int fdatasync(int fd) {
    int done = REAL(fdatasync)(fd);
    if (done == 0)
        note_fd(fd, 's', 0, "", 0);
    return done;
}

int unlink(const char *path) {
    int done = REAL(unlink)(path);
    if (done == 0)
        note(path, 'u', 0, "", 0);
    return done;
}
