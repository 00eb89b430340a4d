// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {CfaToken} from "./CfaToken.sol";
import {IdentityRegistry} from "./IdentityRegistry.sol";
import {Redemption} from "./Redemption.sol";
import {ISSUE, REDEEM, REGISTER, SETTLE} from "./Roles.sol";
import {Settlement} from "./Settlement.sol";

/// Deploys the contracts that all issues share, in one transaction and with all their roles. So no
/// account needs rights over them for their deployment, and none is left with such rights.
contract Platform {
    // Nonces of this contract's deployments, in their order: the addresses follow from them, and
    // the token names its contracts before they exist.
    uint8 private constant SETTLEMENT_NONCE = 3;
    uint8 private constant REDEMPTION_NONCE = 4;

    IdentityRegistry public immutable registry;
    CfaToken public immutable money;
    Settlement public immutable settlement;
    Redemption public immutable redemption;

    error UnexpectedAddress(address expected, address found);

    /// `operatorRoles` are the operator's in the money token; in the other contracts it has the one
    /// role that they have. `accounts` are on the allow-list from the start.
    constructor(
        string memory name,
        string memory symbol,
        uint8 decimals,
        address owner,
        address operator,
        uint256 operatorRoles,
        address feeAccount,
        address[] memory accounts
    ) {
        address[] memory one = new address[](1);
        one[0] = operator;
        registry = new IdentityRegistry(owner, one, _roles(REGISTER), accounts);
        address[] memory three = new address[](3);
        (three[0], three[1], three[2]) = (operator, _child(SETTLEMENT_NONCE), _child(REDEMPTION_NONCE));
        uint256[] memory roles = new uint256[](3);
        (roles[0], roles[1], roles[2]) = (operatorRoles, SETTLE | ISSUE, REDEEM);
        money = new CfaToken(name, symbol, decimals, registry, owner, three, roles, 0, 0, "");
        settlement = new Settlement(money, feeAccount, owner, one, _roles(SETTLE | ISSUE));
        redemption = new Redemption(money, owner, one, _roles(REDEEM));
        _check(SETTLEMENT_NONCE, address(settlement));
        _check(REDEMPTION_NONCE, address(redemption));
    }

    function _roles(uint256 roles) private pure returns (uint256[] memory one) {
        one = new uint256[](1);
        one[0] = roles;
    }

    /// Address of the contract that this one deploys with the nonce, below 128.
    function _child(uint8 nonce) private view returns (address) {
        return address(uint160(uint256(keccak256(abi.encodePacked(bytes2(0xd694), address(this), nonce)))));
    }

    function _check(uint8 nonce, address found) private view {
        if (_child(nonce) != found) revert UnexpectedAddress(_child(nonce), found);
    }
}
