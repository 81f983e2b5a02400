#!/bin/sh
# Makes the certificates of the tests in Python, beside itself. Nobody trusts them but those tests.
#
#   ca.pem                 an authority
#   other.pem              another one, which has issued none of the certificates
#   server.pem, .key       for 127.0.0.1 and localhost
#   elsewhere.pem, .key    for another host
#   expired.pem, .key      for 127.0.0.1, until 2002
#   hosts.pem, .key        for the addresses of tests/hosts
set -eu
cd "$(dirname "$0")"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

authority() { # NAME SUBJECT
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 -subj "/CN=$2" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign" \
        -keyout "$scratch/$1.key" -out "$1.pem" 2>/dev/null
}

server() { # NAME ALTERNATIVE-NAMES FIRST-DAY LAST-DAY
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" \
        -keyout "$1.key" -out "$scratch/$1.csr" 2>/dev/null
    mkdir -p "$scratch/new" && : > "$scratch/index"
    cat > "$scratch/config" <<END
[ca]
default_ca = own
[own]
database = $scratch/index
new_certs_dir = $scratch/new
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = server
[any]
commonName = supplied
[server]
subjectAltName = $2
basicConstraints = critical,CA:FALSE
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
END
    openssl ca -batch -notext -config "$scratch/config" -cert ca.pem -keyfile "$scratch/ca.key" \
        -startdate "$3" -enddate "$4" -in "$scratch/$1.csr" -out "$1.pem" 2>/dev/null
}

authority ca "an authority of the tests"
authority other "another authority of the tests"
server server "IP:127.0.0.1,DNS:localhost" 20250101000000Z 21250101000000Z
server elsewhere "DNS:elsewhere.example" 20250101000000Z 21250101000000Z
server expired "IP:127.0.0.1,DNS:localhost" 20010101000000Z 20020101000000Z
server hosts "$(seq -s , -f 'IP:10.77.0.%.0f' 1 40)" 20250101000000Z 21250101000000Z
