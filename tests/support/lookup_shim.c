// Preloaded into a process, answers look-ups of the host name `moving.test` with the address in a file.
//
// The file is read at each look-up: the address may change while the process runs.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int lookup(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *restrict node, const char *restrict service,
                const struct addrinfo *restrict hints, struct addrinfo **restrict found) {
    char address[64] = "";
    if (node && strcmp(node, "moving.test") == 0) {
        const char *path = getenv("LOOKUP_SHIM_FILE");
        FILE *file = path ? fopen(path, "re") : NULL;
        if (!file || !fgets(address, sizeof address, file)) {
            return EAI_NONAME;
        }
        fclose(file);
        node = address;
    }
    lookup *original = (lookup *)dlsym(RTLD_NEXT, "getaddrinfo");
    return original(node, service, hints, found);
}
