//go:build tools

// What is built here is not ours: this file makes go.mod and go.sum name it, and what it needs.
package interop

import _ "github.com/summerwind/h2spec/cmd/h2spec"
