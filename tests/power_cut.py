"""A disk that forgets, at a power cut, what was not synced."""

from __future__ import annotations

import subprocess
from pathlib import Path

SHIM = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
/* A disk that keeps only what was synced: each fsync of a file in $WATCHED copies it into $SYNCED,
   that of $WATCHED removes what is gone. */
static void forget(int folder) {
    DIR *kept = opendir(getenv("SYNCED"));
    for (struct dirent *entry; (entry = readdir(kept));)
        if (entry->d_name[0] != '.' && faccessat(folder, entry->d_name, F_OK, 0))
            unlinkat(dirfd(kept), entry->d_name, 0);
    closedir(kept);
}
static int keep(int fd) {
    char link[64], path[4096], kept[8192], block[65536];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    struct stat info;
    if (n < 0 || fstat(fd, &info)) return 0;
    path[n] = 0;
    const char *watched = getenv("WATCHED");
    size_t length = strlen(watched);
    if (strncmp(path, watched, length) || (path[length] && strchr(path + length + 1, '/'))) return 0;
    if (!path[length]) forget(fd);
    if (!S_ISREG(info.st_mode)) return 0;
    snprintf(kept, sizeof kept, "%s%s", getenv("SYNCED"), strrchr(path, '/'));
    int out = open(kept, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    for (off_t at = 0; (n = pread(fd, block, sizeof block, at)) > 0; at += n)
        if (write(out, block, n) != n) abort();
    close(out);
    return 0;
}
int fsync(int fd) { return keep(fd); }
int fdatasync(int fd) { return keep(fd); }
"""


class ForgetfulDisk:
    """``kept``, in ``folder``, has the files of ``watched`` as a power cut would leave them, for processes with this
    ``environment``."""

    def __init__(self, folder: Path, watched: Path) -> None:
        self.kept = folder / "kept"
        self.kept.mkdir()
        source, shim = folder / "shim.c", folder / "shim.so"
        source.write_text(SHIM)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source], check=True)
        self.environment = {"LD_PRELOAD": str(shim), "SYNCED": str(self.kept), "WATCHED": str(watched)}
