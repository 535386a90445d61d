#!/usr/bin/env bash
# Makes an authority and the certificates of an etcd and of its clients, in the folder CERTIFICATES:
#   k8s/certificates.sh NAME NAMESPACE [MEMBERS]
# and prints the commands that put them into the Secrets of `elasticzero k8s render --etcd-tls`.
# They are valid for a year. Whoever has authority.key can make clients: keep it off the cluster.
set -euo pipefail
name=${1:?NAME is the --name of the job} namespace=${2:?NAMESPACE is that of the job}
members=${3:-3} folder=${CERTIFICATES:-certificates}
etcd=$name-etcd
umask 077
mkdir -p "$folder"

# Every name is spelled out: gRPC takes no wildcard for names of two parts.
names=DNS:localhost,IP:127.0.0.1,IP:::1
for host in "$etcd" $(for n in $(seq 0 $((members - 1))); do echo "$etcd-$n.$etcd"; done); do
    names+=,DNS:$host,DNS:$host.$namespace.svc,DNS:$host.$namespace.svc.cluster.local
done

make_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null; }
sign() { # certificate, usages, names
    make_key "$folder/$1.key"
    openssl req -new -key "$folder/$1.key" -subj "/CN=$etcd-$1" |
        openssl x509 -req -days 365 -CA "$folder/authority.crt" -CAkey "$folder/authority.key" \
            -CAcreateserial -extfile <(printf 'extendedKeyUsage=%s\n%s\n' "$2" "$3") \
            -out "$folder/$1.crt" 2>/dev/null
}
if [ ! -e "$folder/authority.key" ]; then
    make_key "$folder/authority.key"
    openssl req -x509 -new -key "$folder/authority.key" -days 3650 -subj "/CN=$etcd-authority" \
        -addext 'keyUsage=critical,keyCertSign,cRLSign' -out "$folder/authority.crt"
fi
# Members are each other's clients.
sign server serverAuth,clientAuth "subjectAltName=$names"
sign client clientAuth 'keyUsage=digitalSignature'

for pair in server:tls client:client-tls; do
    kind=${pair%:*}
    echo "kubectl --namespace=$namespace create secret generic $etcd-${pair#*:}" \
        "--from-file=ca.crt=$folder/authority.crt --from-file=tls.crt=$folder/$kind.crt" \
        "--from-file=tls.key=$folder/$kind.key"
done
