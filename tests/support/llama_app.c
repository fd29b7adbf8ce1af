/* The one program that llama.cpp's installer brings, as small as it can be: `serve` is the real server of the
 * library that it is linked to. Tests build it where a distribution has that library and not the program. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int serve(int argc, char **argv) __asm__("_Z12llama_serveriPPc");

int main(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : "help";

    if (!strcmp(word, "serve") || !strcmp(word, "server")) {
        setenv("LLAMA_APP_CMD", "serve", 1); /* with which a router starts its servers */
        return serve(argc - 1, argv + 1);
    }
    if (strcmp(word, "help") && strcmp(word, "--help")) {
        fprintf(stderr, "error: unknown command '%s'\n", word);
        return 1;
    }
    printf("Usage: llama <command> [options]\n\nAvailable commands:\n  serve           HTTP API server\n");
    return 0;
}
